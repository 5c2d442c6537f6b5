"""The promise: a pipeline's losses, gradients and buffers are the unsplit model's, bit by bit."""

from itertools import combinations, pairwise, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import penstock
from penstock.schedules import Backward, Forward
from penstock.schedules.ir import Instruction, Schedule
from penstock.schedules.laws import verify
from penstock.schedules.passes import add_communication
from penstock.schedules.transfers import chain_transfers
from tests.covering import FACTORS, Run, few_runs, many_runs
from tests.every_schedule import EVERY_SCHEDULE, ready_in
from tests.models import ALL_MODELS, BY_NAME, LOW_PRECISION, Model
from tests.reference import Unsplit, chain, split
from tests.side_by_side import assert_trains_like_unsplit, differences, pipeline, same_bits
from tests.ways import IN_ONE_PROCESS

_COVERED = (*ALL_MODELS, LOW_PRECISION)
COVERING = [
    pytest.param(_COVERED[number], run, id=f"{_COVERED[number].name}-{run}")
    for number, run in few_runs(len(_COVERED))
]
"""All pairs of values meet, over all models."""


def check(model: Model, run: Run) -> None:
    """Compare two steps: the second one adds to the gradients and goes on with the buffers."""
    options: dict[str, Any] = {"steps": 2, "bf16": run.autocast, "num_stages": run.num_stages}
    options |= {"num_microbatches": run.num_microbatches, "schedule": run.schedule}
    options |= {"recompute": run.recompute, "transport": run.transport}
    assert_trains_like_unsplit(
        model, max(run.num_samples, model.min_samples * run.num_microbatches), **options
    )


@pytest.mark.parametrize("model, run", COVERING)
def test_training_equals_the_unsplit_model_in_every_bit(model: Model, run: Run) -> None:
    check(model, run)


@pytest.mark.slow
@pytest.mark.parametrize("rotation", range(len(ALL_MODELS)), ids=[m.name for m in ALL_MODELS])
def test_training_equals_the_unsplit_model_in_many_ways(rotation: int) -> None:
    for run in many_runs(rotation):
        check(ALL_MODELS[rotation], run)


def test_all_pairs_of_values_meet_in_what_is_quick() -> None:
    for two in combinations(FACTORS, 2):
        met = {tuple(getattr(case.values[1], name) for name in two) for case in COVERING}
        assert met == set(product(*(FACTORS[name] for name in two))), two


@pytest.mark.parametrize("first", range(0, 32, 4))
def test_all_values_of_any_three_factors_meet_over_four_models(first: int) -> None:
    runs = [run for rotation in range(first, first + 4) for run in many_runs(rotation)]
    for three in combinations(FACTORS, 3):
        met = {tuple(getattr(run, name) for name in three) for run in runs}
        assert met == set(product(*(FACTORS[name] for name in three))), three


def partitions(num_layers: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw the sizes of one to four stages."""

    def sizes(cuts: set[int]) -> tuple[int, ...]:
        edges = [0, *sorted(cuts), num_layers]
        return tuple(b - a for a, b in pairwise(edges))

    return st.sets(st.integers(1, num_layers - 1), max_size=3).map(sizes)


@settings(max_examples=15)
@given(st.data())
def test_training_equals_the_unsplit_model_for_any_partition(data: st.DataObject) -> None:
    model = data.draw(st.sampled_from(ALL_MODELS))
    num_microbatches = data.draw(st.integers(1, 8))
    smallest = model.min_samples * num_microbatches if model.min_samples > 1 else 1
    assert_trains_like_unsplit(
        model,
        data.draw(st.integers(smallest, smallest + 12)),
        steps=data.draw(st.integers(1, 3)),
        bf16=data.draw(st.booleans()),
        partition=data.draw(partitions(len(model.layers()))),
        num_microbatches=num_microbatches,
        schedule=data.draw(st.sampled_from(EVERY_SCHEDULE)),
        recompute=data.draw(st.sampled_from(list(penstock.Recompute))),
        transport=data.draw(st.sampled_from(IN_ONE_PROCESS)),
    )


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Draw a valid schedule: any order in which all operands exist, micro-batches ascending, with
    any stages on any rank.
    """
    num_stages, num_microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    rank_of = [draw(st.integers(0, stage)) for stage in range(num_stages)]
    done = {(stage, backward): 0 for stage in range(num_stages) for backward in (False, True)}
    programs: list[list[Instruction]] = [[] for _ in range(1 + max(rank_of))]
    while True:
        ready = ready_in(done, num_stages, num_microbatches)
        if not ready:
            return Schedule(tuple(map(tuple, programs)))
        stage, backward = draw(st.sampled_from(ready))
        kind = Backward if backward else Forward
        programs[rank_of[stage]].append(kind(stage, done[stage, backward]))
        done[stage, backward] += 1


@settings(max_examples=15)
@given(
    schedule=schedules(),
    name=st.sampled_from(
        ("mlp", "convolutions", "unet", "fan_out", "changing_buffers", "transformer")
    ),
    recompute=st.sampled_from(list(penstock.Recompute)),
    transport=st.sampled_from(IN_ONE_PROCESS),
)
def test_training_equals_the_unsplit_model_for_any_valid_schedule(
    schedule: Schedule, name: str, recompute: penstock.Recompute, transport: penstock.Transport
) -> None:
    chain = chain_transfers(schedule.num_stages)
    verify(add_communication(schedule, chain), chain)
    options: dict[str, Any] = {"steps": 2, "num_stages": schedule.num_stages}
    options |= {"num_microbatches": schedule.num_microbatches}
    options |= {"schedule": lambda num_stages, num_microbatches: schedule, "recompute": recompute}
    options |= {"transport": transport}
    assert_trains_like_unsplit(BY_NAME[name], 2 * schedule.num_microbatches + 1, **options)


@pytest.mark.parametrize("cut", range(1, 10))
def test_a_layer_that_works_in_place_may_stand_at_any_cut(cut: int) -> None:
    """Recompute policies take turns; the last one has a stage of each layer."""
    recompute = list(penstock.Recompute)[cut % len(penstock.Recompute)]
    options: dict[str, Any] = {"num_microbatches": 3, "recompute": recompute}
    partition = (cut, 9 - cut) if cut < 9 else (1,) * 9
    assert_trains_like_unsplit(BY_NAME["in_place"], 7, partition=partition, **options)


@pytest.mark.parametrize("num_samples", (1, 2, 3))
def test_fewer_samples_than_micro_batches_run_as_many_as_there_are(num_samples: int) -> None:
    for model in ALL_MODELS[num_samples - 1 :: 6]:
        if model.min_samples == 1:
            assert_trains_like_unsplit(
                model, num_samples, steps=2, num_stages=2, num_microbatches=4
            )


def test_the_batch_size_may_change_from_step_to_step() -> None:
    model = BY_NAME["transformer"]
    built, twin = model.build(), model.build()
    unsplit = Unsplit(twin.modules, twin.forward, num_microbatches=3)
    with pipeline(model, built, num_stages=3, num_microbatches=3) as pipe:
        for num_samples in (5, 1, 8, 3):
            [(inputs, targets)] = model.batches(num_samples, count=1)
            loss = pipe.train_step(inputs, targets)
            assert same_bits(loss, unsplit.train_step(inputs, targets, model.loss))
            assert not differences(built.modules, twin.modules)


def gradients(modules: list[nn.Module]) -> list[Tensor | None]:
    return [p.grad for module in modules for p in module.parameters()]


@pytest.mark.parametrize("model", ALL_MODELS, ids=repr)
def test_the_reference_gives_finite_gradients_and_the_same_again(model: Model) -> None:
    seen = []
    for _ in range(2):
        built = model.build()
        unsplit = Unsplit(built.modules, built.forward, num_microbatches=2)
        losses = [unsplit.train_step(x, y, model.loss) for x, y in model.batches(5, count=2)]
        found = [g for g in gradients(built.modules) if g is not None]
        seen.append([*losses, *found])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert found and all(bool(torch.isfinite(t).all()) for t in seen[0])
    assert any(bool(g.abs().sum() > 0) for g in found)


def test_one_micro_batch_is_plain_autograd() -> None:
    ours, plain = (
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)) for _ in range(2)
    )
    plain.load_state_dict(ours.state_dict())
    x, y = torch.randn(7, 6), torch.randn(7, 3)
    loss = Unsplit(list(ours), chain(3)).train_step(x, y, F.mse_loss)
    expected = F.mse_loss(plain(x), y)
    expected.backward()
    assert torch.equal(loss, expected)
    for (name, a), (_, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(_grad(a), _grad(b)), name
    for (name, c), (_, d) in zip(ours.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(c, d, rtol=0, atol=1e-7, msg=name)


def test_uneven_batches_are_cut_with_the_larger_pieces_first() -> None:
    assert split(torch.zeros(10), 4)[1] == [3, 3, 2, 2]
    assert split(torch.zeros(2), 4)[1] == [1, 1]
    assert split((torch.zeros(3), None, {"n": 7}), 2)[0][1][1:] == (None, {"n": 7})


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
