"""A model that records all that it sees is run as often as the docs say, whatever was measured."""

import random
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import penstock
from benchmarks.all_pairs import all_pairs
from penstock import Pipeline, Recompute
from penstock.schedules.ir import Recompute as RecomputeInstruction
from tests.distributed.call import call

M = 4
INPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
FACTORS = ((False, True), (False, True), (Recompute.STAGE, Recompute.NEVER, "one layer"))
WAYS = [*product(*FACTORS)]
"""(captured, with example inputs, recompute)."""
PAIRS = all_pairs([(1, 2, 4), *FACTORS])
"""(stages, *way): every two values meet."""


class Records(nn.Module):
    """Notes in Python each time that it runs: in a number, a list, a dict of lists, an object."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0
        self.shapes: list[tuple[int, ...]] = []
        self.nested: dict[str, list[int]] = {"calls": []}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.shapes.append(tuple(x.shape))
        self.nested["calls"].append(len(x))
        if self.training and self.calls == 1:
            warnings.warn("the first call of a Records", stacklevel=1)
        y: Tensor = torch.relu(self.layer(x))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Records() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def hooked(blocks: list[Records], seen: list[str]) -> None:
    """Count every kind of hook, outside of the modules."""

    def note(kind: str) -> Any:
        def hook(*_: Any) -> None:
            seen.append(kind)

        return hook

    for place, block in enumerate(blocks):
        block.register_forward_pre_hook(note(f"{place} before"))
        block.register_forward_hook(note(f"{place} forward"))
        block.register_full_backward_pre_hook(note(f"{place} before backward"))
        block.register_full_backward_hook(note(f"{place} backward"))
        block.layer.weight.register_hook(note(f"{place} gradient"))


def generators() -> tuple[Any, ...]:
    of_numpy: Any = numpy.random.get_state()
    return torch.get_rng_state(), random.getstate(), of_numpy[1].tolist()


def trained(num_stages: int, way: tuple[bool, bool, Any], mesh: Any = None) -> Iterator[Any]:
    """Make a pipeline and train a step: yield what was noticed, and what is due."""
    is_captured, measured, recompute = way
    torch.manual_seed(0)
    model, seen = Model(), list[str]()
    blocks: list[Any] = [*model.blocks]
    layers = penstock.capture(
        model, INPUTS[:2], blocks=["stem", *(f"blocks.{n}" for n in range(4))]
    )
    hooked(blocks, seen)  # capture runs the model, with its hooks
    own = Recompute.layers(1) if recompute == "one layer" else recompute
    where: dict[str, Any] = {"num_stages": num_stages} if mesh is None else {"mesh": mesh}
    options: dict[str, Any] = {"example_inputs": INPUTS} if measured else {}
    states = generators()
    pipe = Pipeline(
        layers if is_captured else [model.stem, *blocks],
        loss=nn.MSELoss(),
        num_microbatches=M,
        recompute=own,
        **where,
        **options,
    )
    pipe.train_step(INPUTS, torch.zeros(8, 4))
    after = generators()
    assert torch.equal(states[0], after[0])
    assert states[1:] == after[1:]
    stages: dict[Any, Any] = {stage.index: stage.plan.steps for stage in pipe._engine.stages}
    programs = pipe.schedule_for().programs
    again: Counter[Any] = Counter(
        i.stage for program in programs for i in program if isinstance(i, RecomputeInstruction)
    )
    for stage, steps in stages.items():
        for step in steps if stage else steps[1:]:
            repeats = again[stage] if recompute != "one layer" or step.index == 1 else 0
            block, place = blocks[step.index - 1], step.index - 1
            kinds = ("before", "forward", "before backward", "backward", "gradient")
            due = [M + repeats] * 2 + [M] * 3
            if is_captured:  # forward hooks see what stands for the result on later stages too
                reruns: Counter[Any] = again if recompute is Recompute.STAGE else Counter()
                due[1] = sum(M + reruns.get(each, 0) for each in stages if each >= stage)
                due[1] += repeats if recompute == "one layer" else 0
            yield (
                [block.calls, len(block.shapes), len(block.nested["calls"]), *block.shapes],
                [seen.count(f"{place} {kind}") for kind in kinds],
                [M + repeats] * 3 + [(2, 4)] * (M + repeats),
                due,
            )


def check(found: Iterator[Any], what: str) -> None:
    for calls, hooks, calls_due, hooks_due in found:
        assert (calls, hooks) == (calls_due, hooks_due), what


@pytest.mark.filterwarnings("ignore:the first call of a Records")
@pytest.mark.parametrize(("num_stages", "captured", "with_inputs", "recompute"), PAIRS)
def test_measuring_is_not_noticed(
    num_stages: int, captured: bool, with_inputs: bool, recompute: Any
) -> None:
    way = (captured, with_inputs, recompute)
    check(trained(num_stages, way), str((num_stages, way)))


def in_processes(mesh: penstock.Mesh) -> list[Any]:
    warnings.filterwarnings("ignore", "the first call of a Records")
    return [[*trained(2, way, mesh)] for way in WAYS]


@pytest.mark.slow
def test_measuring_is_not_noticed_in_processes(tmp_path: Path) -> None:
    for of_rank in call(in_processes, (2, 1), tmp_path):
        for way, found in zip(WAYS, of_rank, strict=True):
            check(iter(found), str(way))


def test_a_warning_of_a_layer_is_left_for_the_step() -> None:
    layers = [Records(), Records()]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        pipe = Pipeline(layers, 2, loss=nn.MSELoss(), num_microbatches=2, example_inputs=INPUTS)
        assert not [w for w in found if "of a Records" in str(w.message)]
        pipe.train_step(INPUTS, torch.zeros(8, 4))
    assert [w for w in found if "of a Records" in str(w.message)]


def test_a_layer_that_needs_its_hook_is_measured_with_it() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    calls: list[int] = []

    def narrow(_: nn.Module, given: tuple[Tensor]) -> Tensor:
        calls.append(len(given[0]))
        return given[0][:, :4]

    layers[0].register_forward_pre_hook(narrow)
    pipe = Pipeline(
        layers, 2, loss=nn.MSELoss(), example_inputs=torch.randn(2, 6), num_microbatches=1
    )
    assert calls
    pipe.train_step(torch.randn(2, 6), torch.zeros(2, 4))
