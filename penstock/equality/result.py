"""What one side of a check gave: named tensors, and a digest of what each layer gave."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.layers import Layers
from penstock.model.pytree import flatten
from penstock.runtime.microbatches import LossFunction


@dataclass(frozen=True, slots=True)
class Result:
    """Named tensors of one side, and a digest of what each layer gave for each micro-batch."""

    tensors: dict[tuple[str, str], Tensor | None]
    layer_outputs: tuple[frozenset[bytes], ...]


@contextmanager
def digests(layers: Layers) -> Iterator[list[set[bytes]]]:
    """Note a digest of what each layer gives, at every call inside."""
    found: list[set[bytes]] = [set() for _ in layers]

    def noting(index: int) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            digest = hashlib.blake2b(digest_size=16)
            for leaf in flatten(output)[0]:
                digest.update(
                    leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                )
            found[index].add(digest.digest())

        return note

    handles = [
        step.module.register_forward_hook(noting(step.index))
        for step in layers
        if not isinstance(step.module, torch.jit.ScriptModule)  # these take no hooks
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def collect(
    layers: Layers,
    loss: LossFunction,
    total: Tensor | None,
    outputs: Any,
    layer_outputs: list[set[bytes]],
) -> Result:
    """Gather what one side is left with after a step: loss, gradients, buffers, outputs."""
    tensors: dict[tuple[str, str], Tensor | None] = {("loss", "loss"): total}
    for prefix, module in [*layers.holders(), *(("loss.", m) for m in as_modules(loss))]:
        for name, parameter in module.named_parameters():
            tensors["gradient", f"{prefix}{name}"] = parameter.grad
        for name, buffer in module.named_buffers():
            tensors["buffer", f"{prefix}{name}"] = buffer
    for n, leaf in enumerate(flatten(outputs)[0]):
        tensors["output", f"output {n}"] = leaf
    return Result(tensors, tuple(map(frozenset, layer_outputs)))


def as_modules(loss: LossFunction) -> list[nn.Module]:
    """Return the loss in a list if it is a module, with parameters and buffers of its own."""
    return [loss] if isinstance(loss, nn.Module) else []
