"""Every family of the zoo, cut and trained, is what it is whole in plain torch, to the bit."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import penstock
from penstock.model.capture.inputs import as_call
from penstock_recipes.zoo import set_drop_path_progress
from tests.every_schedule import EVERY_SCHEDULE
from tests.model.capture.running import (
    Tensors,
    assert_equal,
    buffers,
    captured_of,
    gradients,
    loss,
)
from tests.recipes.zoo_members import BATCH, ZOO_MEMBERS, Member
from tests.reference import Call, Unsplit, chain
from tests.ways import IN_ONE_PROCESS

STEPS = 2
STAGES = (1, 2, 3, 4)
FEWEST, MOST = 1, 4
"""Micro-batches: one, and as many as there may be."""
RECOMPUTE, TRANSPORT = tuple(penstock.Recompute), IN_ONE_PROCESS
BlockCall = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Run:  # one way to train a member
    num_stages: int
    num_microbatches: int
    schedule: Any
    recompute: penstock.Recompute
    transport: penstock.Transport

    def __str__(self) -> str:
        words = (
            f"K{self.num_stages}",
            f"M{self.num_microbatches}",
            self.schedule.name,
            f"recompute_{self.recompute.value}",
            self.transport.name.lower(),
        )
        return "-".join(words)


def few_runs(rotation: int) -> Iterator[Run]:
    for turn, num_stages in enumerate(STAGES, rotation):
        yield Run(
            num_stages,
            MOST - num_stages % 2,
            EVERY_SCHEDULE[turn % len(EVERY_SCHEDULE)],
            RECOMPUTE[turn % len(RECOMPUTE)],
            TRANSPORT[turn // 2 % len(TRANSPORT)],
        )


def many_runs(rotation: int) -> Iterator[Run]:
    """Give a run for every other schedule; all else takes turns, so that members meet other pairs.

    Neighbours among the members take the ones that the other leaves.
    """
    for turn, schedule in list(enumerate(EVERY_SCHEDULE, rotation))[rotation % 2 :: 2]:
        num_stages = STAGES[turn % len(STAGES)]
        recompute = RECOMPUTE[turn // 4 % len(RECOMPUTE)]
        num_microbatches = FEWEST if turn % 5 == 0 else MOST
        transport = TRANSPORT[turn // 2 % len(TRANSPORT)]
        yield Run(num_stages, num_microbatches, schedule, recompute, transport)


def make(name: str, device: str = "cpu") -> Member:
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        return ZOO_MEMBERS[name]()


def captured_layers(model: nn.Module, inputs: Any) -> Any:
    if type(model) is nn.Sequential:
        return model
    return penstock.capture(model, inputs, check=False)  # compared here, more closely


def piped(name: str, num_microbatches: int, **options: Any) -> Tensors:
    model, inputs = make(name)
    told: dict[str, Any] = {"loss": loss, "threads_per_stage": 1}
    with penstock.Pipeline(
        captured_layers(model, inputs), num_microbatches=num_microbatches, **options, **told
    ) as pipe:
        return trained(model, inputs, pipe.train_step, pipe.eval_step)


@cache
def whole(name: str, num_microbatches: int) -> Tensors:
    model, inputs = make(name)
    layers = captured_layers(*make(name))
    calls = None if isinstance(layers, nn.Sequential) else captured_of(layers).calls
    unsplit = plain(model, calls, num_microbatches)
    return trained(model, inputs, partial(unsplit.train_step, loss=loss), unsplit.evaluate)


def trained(
    model: nn.Module,
    inputs: Any,
    train_step: Callable[[Any, Any], Tensor],
    eval_step: Callable[[Any], Any],
) -> Tensors:
    """Take some steps, then evaluate; give losses, gradients, buffers and the output."""
    found: Tensors = {}
    for step in range(STEPS):
        set_drop_path_progress(model, step / (STEPS - 1))
        batch = tree_map(partial(rolled, step), inputs)
        found[f"loss of step {step}"] = train_step(batch, torch.zeros(BATCH))
        now = {**gradients(model), **buffers(model)}
        found.update({f"{name} after step {step}": tensor for name, tensor in now.items()})
    outputs = tree_leaves(eval_step(inputs))
    return {**found, **{f"output {number}": tensor for number, tensor in enumerate(outputs)}}


def rolled(step: int, leaf: Any) -> Any:
    """Give the same samples in another order, for another mini-batch."""
    return leaf.roll(step, 0) if isinstance(leaf, Tensor) else leaf


class AsCalled(nn.Module):  # a model as one of its inputs, which may be several arguments
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Any:
        args, kwargs = as_call(inputs)
        return self.model(*args, **kwargs)


def plain(model: nn.Module, calls: Sequence[BlockCall] | None, num_microbatches: int) -> Unsplit:
    """Run a model by its own forward; each call of a block draws from the stream of its number.

    What draws between blocks has other streams in a pipeline: the zoo has nothing of the kind.
    """
    if calls is None:
        assert isinstance(model, nn.Sequential)
        return Unsplit(list(model), chain(len(model)), num_microbatches)
    numbers = {call: number for number, call in enumerate(calls)}
    blocks = {name: model.get_submodule(name) for name, _ in calls}

    def forward(call: Call, inputs: Any) -> Any:
        counts: Counter[str] = Counter()

        def seed(name: str, *_: Any) -> None:
            call(numbers[name, counts[name]], None)
            counts[name] += 1

        with ExitStack() as stack:
            for name, block in blocks.items():
                handle = block.register_forward_pre_hook(partial(seed, name))
                stack.callback(handle.remove)
            return call(len(calls), inputs)

    return Unsplit([*(nn.Identity() for _ in calls), AsCalled(model)], forward, num_microbatches)


TRAINED = ("unet", "gpt, untied", "gshard_moe, tied")
BY_LAYER = ("residual_network", "wide_resnet", "gpt, tied", "translation, untied, clipped")
"""Members whose training is compared in quick tests; of all others, what a capture checks."""
FEW = [
    pytest.param(
        name,
        run,
        id=f"{name}-{run}",
        marks=[] if run.num_stages > 2 and name in TRAINED else pytest.mark.slow,
    )
    for rotation, name in enumerate(ZOO_MEMBERS)
    for run in list(few_runs(rotation))[rotation % 2 :: 2]
]
"""Every other of a few runs; quick are those of three or four stages, of a few members."""


def check(name: str, run: Run) -> None:
    options: dict[str, Any] = {"recompute": run.recompute, "transport": run.transport}
    found = piped(
        name, run.num_microbatches, num_stages=run.num_stages, schedule=run.schedule, **options
    )
    assert_equal(found, whole(name, run.num_microbatches))


@pytest.mark.parametrize(("name", "run"), FEW)
def test_a_member_trains_cut_as_it_does_whole(name: str, run: Run) -> None:
    check(name, run)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO_MEMBERS)
def test_a_member_trains_cut_as_it_does_whole_by_many_schedules(name: str) -> None:
    for run in many_runs(list(ZOO_MEMBERS).index(name)):
        check(name, run)


def members(quick: Collection[str]) -> list[Any]:
    return [
        pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in ZOO_MEMBERS
    ]


@pytest.mark.parametrize("name", members(BY_LAYER))
def test_each_layer_of_a_member_may_be_a_stage(name: str) -> None:
    """One of training only, too: in evaluation that stage has nothing to do."""
    partition = [1] * len(captured_layers(*make(name)))
    assert_equal(piped(name, MOST, partition=partition), whole(name, MOST))


@pytest.mark.parametrize("name", members(ZOO_MEMBERS.keys() - {*TRAINED, *BY_LAYER}))
def test_a_member_passes_the_check_of_a_capture(name: str) -> None:
    layers = penstock.capture(*make(name))
    assert str(layers).splitlines()[-1].startswith("checked: outputs and gradients over ")


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO_MEMBERS)
def test_a_member_without_values_gets_the_same_ones_for_every_cut(name: str) -> None:
    states = []
    for num_stages in (1, 3):
        model, inputs = make(name, "meta")
        pipe = penstock.Pipeline(
            captured_layers(model, inputs), num_stages=num_stages, num_microbatches=1
        )
        with pipe:
            states.append(pipe.state_dict())
    assert states[0].keys() == make(name)[0].state_dict().keys()
    assert not any(tensor.is_meta for tensor in states[0].values())
    assert_equal(*states)
