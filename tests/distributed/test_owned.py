"""All that a pipeline owns is owned where replicas meet: what layers have, what a model's own code
reads between them, and what a loss has.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Pipeline
from penstock.runtime.pipeline_module import parts_of

from .call import call

NUM_SAMPLES = 8


class Places(nn.Module):
    """A vision transformer by hand, with a parameter and a buffer at every place."""

    def __init__(self) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.randn(1, 1, 4))
        self.positions = nn.Parameter(torch.randn(1, 4, 4))
        self.shared = nn.Parameter(torch.randn(4))
        self.offset: Tensor
        self.register_buffer("offset", torch.randn(4))
        self.stem, self.blocks = Part(), nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.positions
        x = x * self.shared
        for block in self.blocks:
            x = block(x) + self.offset
        return x.mean(1) * self.scale + self.shared


class Part(nn.Module):  # runs a layer, and code of its own around it
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(4, 4), nn.Parameter(torch.randn(4))
        self.factor: Tensor
        self.register_buffer("factor", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.factor + self.bias


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.gate: Tensor
        self.register_buffer("gate", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x)) * self.gate


class Loss(nn.Module):  # a loss with a learned temperature, and a margin in a buffer
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.margin: Tensor
        self.register_buffer("margin", torch.rand(()))

    def forward(self, output: Any, _target: Tensor) -> Tensor:
        rows = next(x for x in _leaves(output) if x.dim())
        return ((rows * self.temperature - self.margin) ** 2).mean()


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    found = [value[key] for key in value] if hasattr(value, "keys") else list(value)
    return [leaf for part in found for leaf in _leaves(part)]


def by_hand() -> tuple[nn.Module, Any]:
    return Places(), torch.randn(NUM_SAMPLES, 3, 4)


def wav2vec2() -> tuple[nn.Module, Any]:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    options: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    options |= {"intermediate_size": 16, "conv_dim": (8, 8), "conv_stride": (5, 2)}
    options |= {"conv_kernel": (10, 3), "num_conv_pos_embeddings": 4}
    options |= {"num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0}
    config = Wav2Vec2Config(**options)
    return Wav2Vec2Model(config), {"input_values": torch.randn(NUM_SAMPLES, 400)}


def clip() -> tuple[nn.Module, Any]:
    from transformers import CLIPConfig, CLIPModel

    size = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    size |= {"num_hidden_layers": 2}
    config = CLIPConfig(
        text_config={**size, "vocab_size": 40, "max_position_embeddings": 8, "eos_token_id": 39},
        vision_config={**size, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    words = torch.randint(0, 39, (NUM_SAMPLES, 6))
    words[:, -1] = 39
    return CLIPModel(config), {
        "input_ids": words,
        "pixel_values": torch.randn(NUM_SAMPLES, 3, 8, 8),
    }


def xlnet() -> tuple[nn.Module, Any]:
    from transformers import XLNetConfig, XLNetModel

    config = XLNetConfig(vocab_size=40, d_model=16, n_layer=2, n_head=2, d_inner=16, dropout=0.0)
    return XLNetModel(config), {"inputs_embeds": torch.randn(NUM_SAMPLES, 5, 16)}


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    made.__name__: made for made in (by_hand, wav2vec2, clip, xlnet)
}


def made(name: str, seed: int) -> tuple[nn.Module, Any, Loss]:
    """Make a model and a loss with the values of a `seed`, and a batch that is always the same."""
    torch.manual_seed(1)
    _, batch = MODELS[name]()
    torch.manual_seed(seed)
    model, _ = MODELS[name]()
    return model.double().train(), _doubled(batch), Loss().double()


def _doubled(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return {key: _doubled(part) for key, part in value.items()}


def _rows(value: Any, rows: slice) -> Any:
    if isinstance(value, Tensor):
        return value[rows]
    return {key: part[rows] for key, part in value.items()}


def two_steps(pipe: Pipeline, batch: Any, replica: int = 0, replicas: int = 1) -> dict[str, Any]:
    """Train twice, clipped; return the gradients and all that there is afterwards."""
    each = NUM_SAMPLES // replicas
    rows = slice(replica * each, (replica + 1) * each)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    found: dict[str, Any] = {"start": _state(pipe)}
    for step in range(2):
        found[f"loss {step}"] = pipe.train_step(_rows(batch, rows), torch.zeros(each))
        grads = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
        whole = parts_of(pipe).shards.whole(grads)
        found |= {f"gradient {step}, {n}": g.detach().clone() for n, g in whole.items()}
        found[f"norm {step}"] = penstock.clip_grad_norm_(pipe, 0.5).double()
        optimizer.step()
        optimizer.zero_grad()
    return found | {f"end, {n}": x for n, x in _state(pipe).items()}


def _state(pipe: Pipeline) -> dict[str, Tensor]:
    held = {n: x.detach() for n, x in parts_of(pipe).held.state().items() if isinstance(x, Tensor)}
    return {n: x.clone() for n, x in parts_of(pipe).shards.whole(held).items()}


def in_replicas(mesh: penstock.Mesh, names: list[str], where: str) -> dict[str, Any]:
    found = {}
    for name in names:
        for sharding in (None, "zero1"):
            model, batch, loss = made(name, seed=mesh.replica)  # unlike at the start
            captured = penstock.capture(model, _rows(batch, slice(2)))
            options: dict[str, Any] = {"example_inputs": _rows(batch, slice(2))}
            pipe = Pipeline(
                captured, num_microbatches=2, loss=loss, mesh=mesh, sharding=sharding, **options
            )
            own = two_steps(pipe, batch, mesh.replica, mesh.num_replicas)
            saved = Path(where) / f"{name}-{mesh.num_stages}-{sharding}"
            penstock.save_checkpoint(saved, pipe)
            found[f"{name}, {sharding}"] = own
    return found


def piped(name: str, seed: int, num_stages: int) -> tuple[Pipeline, Any]:
    model, batch, loss = made(name, seed)
    captured = penstock.capture(model, _rows(batch, slice(2)))
    return Pipeline(captured, num_stages, num_microbatches=4, loss=loss), batch


def check_replicas(num_stages: int, names: list[str], folder: Path) -> None:
    everyone = call(in_replicas, (num_stages, 2), folder, names=names, where=str(folder))
    for name, sharding in product(names, (None, "zero1")):
        wanted = two_steps(*piped(name, 0, 1))
        every = [found[f"{name}, {sharding}"] for found in everyone]
        for one, two in zip(every[:num_stages], every[num_stages:], strict=True):
            ends = [key for key in one if key.startswith("end")]
            assert ends
            assert all(torch.equal(one[key], two[key]) for key in ends), sharding
        for key, value in [pair for found in every for pair in found.pop("start").items()]:
            assert torch.equal(value, wanted["start"][key]), (key, sharding)
        assert {key for found in every for key in found} == {*wanted} - {"start"}
        for key, value in [pair for found in every for pair in found.items()]:
            atol = 1e-6 if key.startswith("norm") else 1e-12
            assert torch.allclose(value, wanted[key], rtol=0, atol=atol), (key, sharding)
        resumed, _ = piped(name, 3, 2)
        penstock.load_checkpoint(folder / f"{name}-{num_stages}-{sharding}", resumed)
        for key, value in _state(resumed).items():
            assert torch.allclose(value, wanted[f"end, {key}"], rtol=0, atol=1e-12), key


def test_two_replicas_train_on_the_whole_batch_with_all_that_they_own(tmp_path: Path) -> None:
    check_replicas(1, ["by_hand"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2])
def test_two_replicas_of_others_train_likewise(num_stages: int, tmp_path: Path) -> None:
    check_replicas(num_stages, list(MODELS), tmp_path)
