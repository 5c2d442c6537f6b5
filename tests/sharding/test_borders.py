"""What goes from one layer to the next has a state for each axis: along data gradients move, and
nothing else.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

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
from penstock.sharding.layouts import I, Layout, S, as_on
from penstock.sharding.named import READY
from penstock_recipes.zoo import gpt
from tests.distributed.call import call

WORDS = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(0))
M = 2
GRIDS = ("grid", "grid+sequence")


def made(width: int = 16, *, num_layers: int = 2, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"width": width, "num_heads": 4, "num_words": 32, "max_length": 8}
    return gpt(num_layers=num_layers, **sizes, dropout=0.1, tied=tied).double()


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def piped(**options: Any) -> Pipeline:
    how: dict[str, Any] = {"num_microbatches": M, "loss": loss, "example_inputs": WORDS, "seed": 3}
    return Pipeline(made(), recompute=Recompute.NEVER, **how, **options)


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
        ("grid+sequence", 2, {(S(0), S(1))}),
        ("grid+sequence", 8, {(S(0), S(1))}),
        ("grid+sequence", 1, {(I, S(1))}),
        ("data", 2, {(S(0), I)}),
        ("data", 8, {(S(0), S(0))}),
        ("sequence", 2, {(S(1), S(1))}),
        ("megatron", 8, {()}),
    ],
)
def test_each_axis_has_a_state_of_its_own_between_layers(sharding, num_samples, wanted) -> None:
    found = between(made(), num_samples, (2, 2), sharding)
    assert found and found <= wanted


def test_data_x_tensor_costs_no_more_for_a_sample_on_each_than_megatron_within() -> None:
    """Along data nothing is sent between layers: a block sends what it does with tensors alone."""
    model = made(64)

    def sent(mesh: Any, sharding: str, num_samples: int) -> int:
        words = torch.zeros(num_samples, 8, dtype=torch.long)
        found = penstock.shard(model, words, mesh, sharding=sharding)
        return found.layers[1].forward_bytes + found.layers[1].backward_bytes

    assert 0 < sent((4, 2), "grid", 4) <= sent((2,), "megatron", 1)


def stepped(mesh: Mesh | None, sharding: Any = None) -> dict[str, Any]:
    """Train for a step; return its loss and gradients, and the bytes of values, in float64, that
    moved along each axis; which gradients there are is told in float32.
    """
    moved = Counter[str]()

    def counted(name: str) -> None:
        own = getattr(Collectives, name)

        def begin(axis: Collectives, given: Any, *others: Any) -> Any:
            if axis.size > 1 and mesh is not None and axis in mesh.shard_axes:
                parts = [given] if isinstance(given, Tensor) else given
                num_bytes = sum(p.nbytes for p in parts if p.dtype is torch.float64)
                moved[f"{mesh.shard_axes.index(axis)}, {name}"] += num_bytes
            return own(axis, given, *others)

        setattr(Collectives, name, begin)

    for name in ("begin_all_reduce", "all_gather", "all_to_all"):
        counted(name)
    pipe = piped(partition=[5]) if mesh is None else piped(mesh=mesh, sharding=sharding)
    moved.clear()
    found: dict[str, Any] = {"loss": pipe.train_step(WORDS, WORDS), "moved": dict(moved)}
    gradients = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
    found["held"] = sum(gradient.nbytes for gradient in gradients.values())
    whole = parts_of(pipe).shards.whole(gradients)
    return found | {"gradients": whole, "table": str(pipe.sharding)}


@pytest.mark.parametrize(("num_stages", "sharding"), [*product([1, 2], GRIDS)])
@pytest.mark.slow
def test_along_data_gradients_move_and_the_output_and_no_other_byte(
    num_stages: int, sharding: str, tmp_path: Path
) -> None:
    """The loss has the whole output: it is the only one of all activations that is gathered."""
    wanted = stepped(None)
    placement = Placement.of(range(num_stages), num_shards=(2, 2))
    for rank, found in enumerate(call(stepped, placement, tmp_path, sharding=sharding)):
        along_data = {name[3:]: n for name, n in found["moved"].items() if name[0] == "0"}
        output = 0 if rank < 4 * (num_stages - 1) else M * 8 * 32 // 2 * 8  # of a sample, by words
        gathered = {"all_gather": output} if output else {}
        assert along_data == {"begin_all_reduce": found["held"], **gathered}
        assert any(name[0] == "1" for name in found["moved"])
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
