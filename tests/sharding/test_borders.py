"""What goes from one layer to the next has a state for each axis: along data gradients move, and
nothing else.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Mesh, Pipeline, Recompute
from penstock.errors import PenstockError
from penstock.mesh.collectives import Collectives
from penstock.model.entries import layout_on, marked
from penstock.planner.placement import Placement
from penstock.runtime.pipeline_module import parts_of
from penstock.runtime.shards.convert import _moved as MOVED
from penstock.sharding.layouts import I, Layout, Move, S, as_on
from penstock.sharding.named import READY
from penstock.sharding.plan import sent_bytes
from penstock_recipes.zoo import gpt
from tests.distributed.call import call

M = 2
GRIDS = ("grid", "grid+sequence")
NUMBERS_OF_LOSS = 16
"""Bytes of a micro-batch's loss that are summed over samples: losses and their number."""


def all_reduces(num_bytes: int, axes: Sequence[int]) -> float:
    """Return the bytes that a device sends for a layer: 4 all-reduces (Narayanan et al. 2021)."""
    return 4 * sum(2 * num_bytes * (n - 1) / n for n in axes)


def gathers_and_scatters(num_bytes: int, axes: Sequence[int]) -> float:
    """Return the same for 4 all-gathers and 4 reduce-scatters (Korthikanti et al. 2022)."""
    return 4 * 2 * num_bytes * (prod(axes) - 1) / prod(axes)


OF_GRIDS = (*zip(GRIDS, (all_reduces, gathers_and_scatters), strict=True),)


def made(width: int = 16, *, num_layers: int = 2, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"width": width, "num_heads": 4, "num_words": 32, "max_length": 8}
    return gpt(num_layers=num_layers, **sizes, dropout=0.1, tied=tied).double()


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def piped(**options: Any) -> Pipeline:
    how: dict[str, Any] = {"num_microbatches": M, "loss": loss, "seed": 3}
    return Pipeline(made(), recompute=Recompute.NEVER, **how, **options)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def between(model: Any, num_samples: int, mesh: Sequence[int], sharding: str) -> set[Layout]:
    """Return the layouts of what goes from one block to another, as planned."""
    words = torch.zeros(num_samples, 8, dtype=torch.long)
    found = penstock.shard(model, words, tuple(mesh), sharding=sharding)
    blocks = [layer for layer in found.layers[:-1] if layer.name.startswith("blocks")]
    return {layer.leaving.get((len(layer.calls) - 1, 0), ()) for layer in blocks[:-1]}


@pytest.mark.parametrize(
    ("sharding", "num_samples", "wanted"),
    [
        ("grid", 2, {(S(0), I), (S(0), S(1))}),
        ("grid", 8, {(S(0), I), (S(0), S(0)), (S(0), S(1))}),
        slow("grid+sequence", 2, {(S(0), S(1))}),
        ("grid+sequence", 8, {(S(0), S(1))}),
        ("grid+sequence", 1, {(I, S(1))}),
        slow("grid", 3, {(S(0), I), (S(0), S(1))}),
        slow("grid", 8, {(S(0), I, I), (S(0), S(0), S(0)), (S(0), S(1), S(1))}),
        ("grid+sequence", 3, {(S(0), S(1))}),
        slow("grid+sequence", 2, {(S(0), S(1), S(1))}),
        ("grid+sequence", 1, {(I, S(1), S(1))}),
        ("data", 2, {(S(0), I)}),
        ("data", 8, {(S(0), S(0))}),
        ("sequence", 2, {(S(1), S(1))}),
        ("context", 1, {(S(1), S(1))}),
        ("context+sequence", 1, {(S(1), S(1))}),
        ("data+context", 2, {(S(0), S(1))}),
        slow("data+context+sequence", 2, {(S(0), S(1), S(1))}),
        ("megatron", 8, {()}),
    ],
)
def test_each_axis_has_a_state_of_its_own_between_layers(sharding, num_samples, wanted) -> None:
    found = between(made(), num_samples, (2,) * (max(map(len, wanted)) or 2), sharding)
    assert found and found <= wanted


@pytest.mark.parametrize(
    ("sharding", "mesh", "num_samples", "bytes_of"),
    [
        ("megatron", (2,), 1, all_reduces),
        ("sequence", (2,), 1, gathers_and_scatters),
        *((name, (2, 2), 8, found) for name, found in OF_GRIDS),
        *(slow(name, (2, 2), 2, found) for name, found in OF_GRIDS),
        *((name, (4, 2), 4, found) for name, found in OF_GRIDS),
    ],
)
def test_a_block_sends_along_tensors_what_the_papers_count_and_nothing_along_data(
    sharding: str, mesh: tuple[int, ...], num_samples: int, bytes_of: Any
) -> None:
    """Half of it in the forward, where values between calls have one layout; a block's sums of
    gradients are once a step and not counted.
    """
    with torch.device("meta"):
        model = made(256)
    num_samples *= 512  # so many that bytes count, and not how long collectives take to begin
    words, tensors = torch.zeros(64 * num_samples, 8, dtype=torch.long), mesh[1:] or mesh
    found = penstock.shard(model, words, mesh, sharding=sharding, num_microbatches=64)
    own_bytes = num_samples // (prod(mesh) // prod(tensors)) * 8 * 256 * 8
    block = found.layers[1]
    both = block.forward_bytes, block.backward_bytes
    assert sum(both) == bytes_of(own_bytes, tensors)
    assert sharding == "grid" or both[0] == both[1]


def stepped(mesh: Mesh | None, sharding: Any = None, num_samples: int = 4) -> dict[str, Any]:
    """Train for a step; return its loss and gradients, and the bytes of values, in float64, that
    moved along each axis; which gradients there are is told in float32.  Of conversions, return
    the bytes that were sent, and those that the plan counts.
    """
    moved, sent = Counter[str](), list[float]()
    axes = () if mesh is None else (*mesh.shard_axes, *mesh.sum_axes)

    def counted(name: str) -> None:
        own = getattr(Collectives, name)

        def begin(axis: Collectives, given: Any, *others: Any) -> Any:
            if axis.size > 1 and axis in axes:
                parts = [given] if isinstance(given, Tensor) else given
                num_bytes = sum(p.nbytes for p in parts if p.dtype is torch.float64)
                moved[f"{axes.index(axis) % (len(axes) // 2)}, {name}"] += num_bytes
            return own(axis, given, *others)

        setattr(Collectives, name, begin)

    def converted(tensor: Tensor, move: Move, step: Any) -> Tensor:
        result, count = MOVED(tensor, move, step), step[0].size
        held = max(tensor.nbytes, result.nbytes) * (count if move is Move.ALL_TO_ALL else 1)
        sent.append(sent_bytes(move, held, count))
        return result

    for name in ("begin_all_reduce", "all_gather", "all_to_all"):
        counted(name)
    words = torch.arange(num_samples * 8).view(num_samples, 8) % 32
    how: dict[str, Any] = {"partition": [5]} if mesh is None else {"mesh": mesh}
    pipe = piped(example_inputs=words, sharding=sharding, **how)
    moved.clear()
    with patch("penstock.runtime.shards.convert._moved", converted):
        found: dict[str, Any] = {"loss": pipe.train_step(words, words), "moved": dict(moved)}
    gradients = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
    found["held"] = sum(gradient.nbytes for gradient in gradients.values())
    layers = pipe.sharding.layers if pipe.sharding is not None else ()
    found["planned"] = M * sum(layer.forward_bytes + layer.backward_bytes for layer in layers)
    return found | {"gradients": parts_of(pipe).shards.whole(gradients), "sent": sum(sent)}


@pytest.mark.parametrize(
    ("num_stages", "mesh", "num_samples", "sharding"),
    [
        *product([1, 2], [(2, 2)], [4], GRIDS),
        *product([1], [(2, 2)], [6], GRIDS),
        (1, (2, 2, 2), 4, "grid+sequence"),
    ],
)
@pytest.mark.slow
def test_along_data_gradients_move_and_the_loss_and_no_other_byte(
    num_stages: int, mesh: tuple[int, ...], num_samples: int, sharding: str, tmp_path: Path
) -> None:
    """No activation does: the loss takes the slices of the output, and its numbers are summed.

    All else that is sent is what the plan counts, and a few numbers of each word; of 3 samples
    devices have 2 and 1.
    """
    wanted = stepped(None, num_samples=num_samples)
    placement = Placement.of(range(num_stages), num_shards=mesh)
    how: dict[str, Any] = {"sharding": sharding, "num_samples": num_samples}
    for rank, found in enumerate(call(stepped, placement, tmp_path, **how)):
        along_data = {name[3:]: n for name, n in found["moved"].items() if name[0] == "0" and n}
        has_loss = rank // prod(mesh) == num_stages - 1
        assert along_data == {"begin_all_reduce": found["held"] + has_loss * M * NUMBERS_OF_LOSS}
        assert any(name[0] == "1" for name in found["moved"])
        if num_stages == 1 and num_samples % (M * mesh[0]) == 0:  # the plan counts even slices
            num_words = num_samples * 8 // mesh[0]
            assert 0 < found["sent"] - found["planned"] <= 4 * 8 * num_words  # the loss's numbers
        assert torch.allclose(found["loss"], wanted["loss"], rtol=0, atol=1e-12)
        assert found["gradients"]
        for name, gradient in found["gradients"].items():
            assert torch.allclose(gradient, wanted["gradients"][name], rtol=0, atol=1e-12), name


def test_a_layout_of_states_that_differ_stands_on_what_comes_from_another_stage() -> None:
    own = (S(0, (1, 1)), I)
    assert as_on(own, (2, 2), 3) is own
    assert layout_on(marked(torch.zeros(1, 8), [own], 0)) is own
    assert as_on((S(0, (1, 1)), S(0, (1, 0))), (4,), 3) == (S(0, (1, 1, 0, 0)),)


def test_layers_that_are_alike_are_compared_by_the_names_of_their_own() -> None:
    """The program of one is that of all, whichever of them asked for it first."""
    with torch.device("meta"):
        model = made(256, num_layers=3)
    words = torch.zeros(8, 8, dtype=torch.long)
    found = penstock.shard(model, words, (2, 2), sharding="grid")
    ways = [[call.instead for call in layer.calls] for layer in found.layers]
    assert any(ways[1]) and ways[1] == ways[2]


PLANS = (*READY, "zero1", "megatron+zero1")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2), (4, 2)], ids=str)
def test_each_mesh_plan_and_number_of_samples_is_planned_or_refused(mesh: tuple[int, ...]) -> None:
    with torch.device("meta"):
        models = [made(64, num_layers=3, tied=tied) for tied in (True, False)]
    planned = 0
    for number, (sharding, num_samples) in enumerate(product(PLANS, (1, 2, 3, 4, 5, 6, 8))):
        words = torch.zeros(num_samples, 8, dtype=torch.long)
        try:
            penstock.shard(models[number % 2], words, mesh, sharding=sharding)
        except PenstockError as error:
            assert str(error)
        else:
            planned += 1
    assert planned == 7 * len(PLANS)
