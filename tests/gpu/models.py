"""Small models for a device, and a step of them without a pipeline."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock_recipes.zoo import gpt

Loss = Callable[[Tensor, Tensor], Tensor]


class Subject(NamedTuple):
    """A model with a batch on its device, its loss, and how near its gradients are to come."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    loss: Loss
    tolerance: float = 0.0


def products(device: str, width: int = 64, batch: int = 32) -> Subject:
    """Make a chain whose kernels add in one order always: bits are to be equal."""
    torch.manual_seed(0)
    layers = [module for _ in range(4) for module in (nn.Linear(width, width), nn.Tanh())]
    inputs, targets = torch.randn(2, batch, width)
    model = nn.Sequential(*layers).to(device)
    return Subject(model, inputs.to(device), targets.to(device), nn.functional.mse_loss)


def words_loss(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def language(device: str, dropout: float = 0.0) -> Subject:
    """Make a GPT in float64, whose kernels may add in any order."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"width": 32, "num_heads": 4, "num_words": 32, "max_length": 16}
    model = gpt(num_layers=3, **sizes, dropout=dropout).double().to(device)
    words = torch.randint(0, 32, (8, 16)).to(device)
    return Subject(model, words, words, words_loss, 1e-12)


def unsplit(subject: Subject, num_microbatches: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Take a step in plain torch, micro-batch after micro-batch; return its loss and gradients."""
    model, losses = subject.model, []
    model.zero_grad()
    halves = (x.tensor_split(num_microbatches) for x in (subject.inputs, subject.targets))
    for inputs, targets in zip(*halves, strict=True):
        loss = subject.loss(model(inputs), targets) * (len(inputs) / len(subject.inputs))
        with torch.autocast(inputs.device.type, enabled=False):  # as torch advises
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum(), gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def unlike(
    found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 0.0
) -> list[str]:
    """Name the tensors that are further apart than that, as a share of the largest number of all:
    some gradients are zero but for rounding.
    """
    assert found.keys() == wanted.keys()
    most = tolerance * max(tensor.abs().max().item() for tensor in wanted.values())
    pairs = ((name, found[name].cpu(), wanted[name].cpu()) for name in wanted)
    return [name for name, one, other in pairs if not (one - other).abs().max() <= most]
