"""Interleaved 1F1B: its grid, its laws for any ranks, stages and micro-batches, and its errors."""

from fractions import Fraction
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import penstock
from penstock.errors import ConfigError
from penstock.schedules import Forward, Schedule, interleaved_1f1b, one_f_one_b, parse
from penstock.schedules.lower import Lowering, Mode, lower
from penstock.schedules.transfers import Transfer, chain_transfers
from penstock.simulator import UNIT_COSTS, Costs, simulate
from penstock.trace.grid import render_grid

FORWARD_S, BACKWARD_S = 1, 2
SIZES = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 20))
"""Ranks, stages on each, micro-batches: also fewer than ranks, and no multiple of them."""


def test_of_an_incomplete_group_the_missing_micro_batches_are_struck_out() -> None:
    assert interleaved_1f1b(stages_per_rank=2)(4, 3) == parse("""
        rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 2B1 2F2 0B0 0B1 2B2 0B2
        rank 1 | 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1B1 3F2 3B2 1B2
    """)


def test_a_single_rank_runs_all_stages() -> None:
    assert interleaved_1f1b(stages_per_rank=2)(2, 2) == parse(
        "rank 0 | 0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1"
    )


@given(SIZES)
def test_every_size_is_proved_free_of_deadlock_and_exact(sizes: tuple[int, int, int]) -> None:
    num_ranks, stages_per_rank, num_microbatches = sizes
    num_stages = num_ranks * stages_per_rank
    schedule = interleaved_1f1b(stages_per_rank)(num_stages, num_microbatches)
    assert schedule.num_ranks == num_ranks
    assert schedule.ranks == tuple(stage % num_ranks for stage in range(num_stages))
    skips = (Transfer(producer=0, consumer=stage) for stage in range(2, num_stages))
    how = Lowering(
        family=interleaved_1f1b(stages_per_rank),
        ranks=schedule.ranks,
        transfers=(*skips, *chain_transfers(num_stages)),
        recompute=range(num_stages),
        commits=range(num_stages),
        posts=True,
        reduces=True,
    )
    for mode in Mode:
        lower(how, num_microbatches, mode)


@pytest.mark.slow
@given(SIZES)
def test_the_bubble_is_that_of_1f1b_divided_by_the_stages_of_a_rank(sizes) -> None:
    num_ranks, stages_per_rank, groups = sizes
    num_microbatches = num_ranks * groups
    schedule = interleaved_1f1b(stages_per_rank)(num_ranks * stages_per_rank, num_microbatches)
    timeline = simulate(schedule, UNIT_COSTS)
    work_s = (FORWARD_S + BACKWARD_S) * stages_per_rank * num_microbatches
    idle_s = (FORWARD_S + BACKWARD_S) * (num_ranks - 1)
    assert timeline.step_s == work_s + idle_s
    assert timeline.bubble == Fraction(idle_s, work_s + idle_s)
    assert timeline.breakdown().share_of_ideal == 1


@given(SIZES)
def test_no_step_is_longer_than_that_of_1f1b(sizes: tuple[int, int, int]) -> None:
    num_ranks, stages_per_rank, num_microbatches = sizes
    schedule = interleaved_1f1b(stages_per_rank)(num_ranks * stages_per_rank, num_microbatches)
    whole = Costs(forward_s=stages_per_rank, backward_s=2 * stages_per_rank, recompute_s=1)
    longest_s = simulate(one_f_one_b(num_ranks, num_microbatches), whole).step_s
    assert simulate(schedule, UNIT_COSTS).step_s <= longest_s


@pytest.mark.parametrize("num_ranks, stages_per_rank", [(2, 2), (3, 2), (4, 3)])
def test_the_first_rank_keeps_as_many_as_it_warms_up_with_and_one(
    num_ranks: int, stages_per_rank: int
) -> None:
    schedule = interleaved_1f1b(stages_per_rank)(num_ranks * stages_per_rank, 8 * num_ranks)
    steps = (1 if isinstance(x, Forward) else -1 for x in schedule.programs[0])
    warmup = 2 * (num_ranks - 1) + (stages_per_rank - 1) * num_ranks
    assert max(accumulate(steps)) == warmup + 1


def test_the_simulator_prices_no_transfer_within_a_rank() -> None:
    slow = Costs(forward_s=1, backward_s=2, recompute_s=1, transfer_s=100)
    assert simulate(interleaved_1f1b(3)(3, 4), slow).step_s == 3 * 4 * 3


def test_the_grid_names_the_stage_of_each_box() -> None:
    grid = render_grid(simulate(interleaved_1f1b(2)(4, 2), UNIT_COSTS), 120)
    assert "0F1" in grid and "2F0" in grid and "rank 2" not in grid


@pytest.mark.parametrize("count", (0, -1, 1.5, True, "2"))
def test_the_stages_of_a_rank_are_a_whole_number(count: object) -> None:
    with pytest.raises(ConfigError, match="must be a whole number of at least 1"):
        interleaved_1f1b(count)  # type: ignore[arg-type]


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4) for _ in range(6)]


def pipeline(schedule: object, **options: object) -> penstock.Pipeline:
    return penstock.Pipeline(
        layers(),
        loss=nn.functional.mse_loss,
        num_microbatches=3,
        schedule=schedule,  # type: ignore[arg-type]
        **options,  # type: ignore[arg-type]
    )


def idle(num_stages: int, num_microbatches: int) -> Schedule:
    """Give the first rank nothing to do."""
    return Schedule(((), *one_f_one_b(1, num_microbatches).programs))


@pytest.mark.parametrize(
    ("schedule", "num_stages", "is_meshed", "said"),
    [
        (interleaved_1f1b(2), 5, False, r"num_stages=5 is not a multiple.*choose 4 or 6 stages"),
        (interleaved_1f1b, 5, False, r"num_stages=5 is not a multiple.*choose 4 or 6 stages"),
        (interleaved_1f1b(2), 6, True, "has 2 ranks a pipeline, the schedule runs 6 stages on 3"),
        (one_f_one_b, 4, True, "has 2 ranks a pipeline, the schedule runs 4 stages on 4"),
        (idle, 1, True, "gives rank 0 of the mesh no stage"),
    ],
)
def test_stages_that_cannot_be_dealt_out_are_refused(
    schedule, num_stages, is_meshed, said
) -> None:
    options = {"mesh": penstock.init_mesh(2)} if is_meshed else {}
    with pytest.raises(ConfigError, match=said):
        pipeline(schedule, num_stages=num_stages, **options)


def test_a_mesh_of_ranks_holds_as_many_stages_as_the_schedule_says() -> None:
    mesh = penstock.init_mesh(2)
    for options in ({}, {"num_stages": 6}, {"partition": [1] * 6}):
        pipe = pipeline(interleaved_1f1b(3), mesh=mesh, **options)
        assert pipe.num_stages == 6
        assert "schedule=interleaved_1f1b(stages_per_rank=3)" in repr(pipe)
    assert pipeline(one_f_one_b, mesh=mesh).num_stages == 2


def test_a_rank_per_thread_and_torchs_threads_divided_among_ranks() -> None:
    torch.set_num_threads(4)
    try:
        assert pipeline(interleaved_1f1b(3), num_stages=6).threads_per_stage == 2
        assert pipeline(interleaved_1f1b(1), num_stages=6).threads_per_stage == 1
    finally:
        torch.set_num_threads(1)
    assert pipeline(interleaved_1f1b(6), num_stages=6).threads_per_stage == 1


def test_a_schedule_that_deals_out_stages_differently_for_a_small_batch_is_refused() -> None:
    def moody(num_stages: int, num_microbatches: int) -> Schedule:
        return interleaved_1f1b(2 if num_microbatches == 3 else 1)(num_stages, num_microbatches)

    with pipeline(moody, num_stages=4) as pipe:
        pipe.train_step(torch.randn(6, 4), torch.randn(6, 4))
        with pytest.raises(ConfigError, match=r"with 2 micro-batches .* ranks \[0, 1, 2, 3\]"):
            pipe.train_step(torch.randn(2, 4), torch.randn(2, 4))
