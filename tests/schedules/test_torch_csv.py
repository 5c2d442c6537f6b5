"""Schedules in the CSV form of torch.distributed.pipelining: theirs are read, ours are theirs.

The files in torch_csv/ were written by torch 2.13, from its own schedule classes.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import penstock
from penstock import schedules
from penstock.errors import ConfigError, ScheduleError
from penstock.schedules import Family, Schedule, from_csv, parse, to_csv
from penstock.schedules.names import family_named
from penstock.schedules.passes import add_communication, add_recompute
from penstock.schedules.torch_csv import read_csv
from penstock.schedules.transfers import chain_transfers
from penstock.simulator import UNIT_COSTS, simulate
from tests.every_schedule import EVERY_SCHEDULE, divided
from tests.ways import IN_ONE_PROCESS, one_each

FILES = Path(__file__).parent / "torch_csv"
OURS = tuple(family for family in (*EVERY_SCHEDULE, divided) if isinstance(family, Family))
VALID = (
    *("GPipe", "Interleaved1F1B", "InterleavedZeroBubble"),
    *("ZBVZeroBubble_with_communication", "DualPipeV"),
)
WRONG = {
    "a word that is no action": ("0F0,0B0\n1F0,1X0", "line 2, cell 2, '1X0': it is no action;"),
    "an action without its micro-batch": ("0F0,0B", "line 1, cell 2, '0B': it is no action"),
    "a pair of which one is no action": ("0F0,(0F1;0B)OVERLAP_F_B", "0B)OVERLAP_F_B': it is no"),
    "a micro-batch beyond what memory holds": (
        "0F99999999999,0B0",
        "no micro-batch of this number",
    ),
    "a stage that no line runs": ("0F0,0B0\n30000000F0,1B0", "there is no stage of this number"),
    "a number of thousands of digits": (f"0F{'1' * 5000},", "cell 1, '0F1111111111111111111"),
    "a cell longer than any that csv reads": (
        f"0F0,0B0\n1F0,{'x' * 200_000},1B0",
        "line 2: it is no row of actions: field larger than field limit (131072)",
    ),
    "digits of another script": ("0F\u0663,0B0", "it is no action"),
    "a pair in other brackets": ("0F0,[0F1;0B0]OVERLAP_F_B", "cell 2, '[0F1;0B0]OVERLAP_F_B'"),
    "an action twice": ("0F0,0B0\n1F0,,1F0,1B0", "line 2, cell 3, '1F0': it comes twice"),
    "a stage on two ranks": ("0F0,0B0\n1F0,0F1,1B0", "'0F1': stage 0 runs in line 1 too"),
    "a forward is missing": ("0F0,0F1,0B0,0B1\n1F0,1B0,1B1", "stage 1 has 0 Forward"),
    "what is there of its micro-batch": ("0F0,0F1,0B0,0B1\n1F0,1B0,1B1", ">>1B1<<"),
    "a backward is missing": ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1", ">>0F1<<"),
    "the second part of a backward is missing": (
        "0F0,0I0\n1F0,1B0",
        "stage 0 has 0 BackwardWeight instructions for micro-batch 0",
    ),
    "a backward before its forward": ("0B0,0F0\n1F0,1B0", ">>0B0<<"),
    "forwards out of order": ("0F1,0F0,0B0,0B1\n1F1,1F0,1B0,1B1", "rank 0, 0F1: the forwards of"),
    "ranks that wait for each other": ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "1 waits at 1F1<0"),
    "a rank that runs nothing": ("0F0,0B0\n,\n1F0,1B0", "line 2 has no action: each line is a"),
    "idle ranks": (",\n", "line 1 has no action"),
    "nothing": ("\n", "the schedule runs nothing"),
    "no text": ("", "the schedule runs nothing"),
}


def file(name: str) -> Path:
    return FILES / f"{name}.csv"


@pytest.mark.parametrize("name", VALID)
def test_what_torch_writes_is_read_and_written_again(name: str) -> None:
    schedule = read_csv(file(name))
    assert read_csv(to_csv(schedule)) == schedule
    assert from_csv(file(name)) == from_csv(to_csv(schedule))
    assert simulate(schedule, UNIT_COSTS).step_s > 0


@pytest.mark.parametrize("name", ("Interleaved1F1B", "DualPipeV"))
def test_the_communication_that_torch_adds_is_left_out(name: str) -> None:
    assert read_csv(file(name)) == read_csv(file(f"{name}_with_communication"))


def test_actions_keep_their_order_and_idle_cells_say_nothing() -> None:
    text = "0F0,0F1,,,0B0,0B1\n,1F0,1I0,(1F1;1W0)OVERLAP_F_B,1B1,1REDUCE_GRAD,\n"
    assert str(read_csv(text)) == "rank 0 | 0F0 0F1 0B0 0B1\nrank 1 | 1F0 1I0 1F1 1W0 1B1"


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_named(wrong: str) -> None:
    text, message = WRONG[wrong]
    with pytest.raises(ScheduleError) as caught:
        from_csv(text)
    assert message in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_the_first_cell(tmp_path: Path) -> None:
    path = tmp_path / "marked.csv"
    path.write_text("0F0,0B0\n", encoding="utf-8-sig")
    assert read_csv(path) == read_csv("0F0,0B0\n")


def test_an_error_shows_only_what_is_near_the_cell() -> None:
    with pytest.raises(ScheduleError) as caught:
        from_csv(",".join([*["0F0"], *[""] * 5000, f"x{'y' * 5000}"]))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        # gradients would add up in another order
        (from_csv, file("LoopedBFS"), "rank 0, 0B3: the backwards of a stage must come in"),
        # what torch gives lacks the last stage's first forward
        (from_csv, file("1F1B"), r"stage 0 has 0 Forward .* micro-batch 6"),
        (to_csv, schedules.one_f_one_b, r"^one_f_one_b is no schedule of one size: call the"),
        (to_csv, parse("rank 0 | 0F0 0B0 0F1@1 0B1"), "0F1@1: weights are updated within the"),
        (to_csv, parse("rank 0 | 0F0 0B0 0U"), "rank 0, 0U: weights are updated within the"),
    ],
)
def test_what_cannot_be_read_or_written_is_refused(make: Any, given: Any, said: str) -> None:
    with pytest.raises((ConfigError, ScheduleError), match=said):
        make(given)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ScheduleError, match="is no text, and so no CSV"):
        from_csv(str(path))


def test_a_plan_from_a_file_opens_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,0B0\n")
    family = from_csv(path)
    assert family_named("from_csv", dict(family.arguments)) == family
    for text in (str(path), "0F0"):
        with pytest.raises(ScheduleError, match=r"is no action|has 0 Backward"):
            family_named("from_csv", {"source": text})


def test_it_is_of_the_size_of_the_file_or_of_fewer_micro_batches() -> None:
    family = from_csv(file("ZBVZeroBubble_with_communication"))
    assert family.ranks(6) == (0, 1, 2, 2, 1, 0) and family.stages_per_rank == 2
    assert family(6, 6) == read_csv(file("ZBVZeroBubble_with_communication"))
    for num_microbatches in range(1, 6):
        schedule = family(6, num_microbatches)
        assert schedule.num_microbatches == num_microbatches
        assert schedule.ranks == family.ranks(6)
    with pytest.raises(ConfigError, match="has 6 micro-batches, and 7 were asked for"):
        family(6, 7)
    for ask in (family.ranks, lambda num_stages: family(num_stages, 6)):
        with pytest.raises(ConfigError, match="has 6 stages, and 8 were asked for: make it 6, o"):
            ask(8)


def test_families_of_equal_files_are_equal_and_print_what_makes_them() -> None:
    family = from_csv("0F0,,0B0\n1F0,1B0")
    assert family == from_csv("0F0,0B0\n1F0,1B0\n")
    assert eval(repr(family), {"from_csv": from_csv}) == family


@pytest.mark.parametrize(
    "name, transport",
    one_each(VALID, IN_ONE_PROCESS),
)
def test_what_torch_writes_trains_like_the_unsplit_model(name, transport) -> None:
    schedule = read_csv(file(name))
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(num_stages)]
    for fewer in (0, 1):
        samples = num_microbatches - fewer
        report = penstock.check(
            layers,
            torch.randn(samples, 4),
            torch.randn(samples, 4),
            loss=nn.MSELoss(),
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            schedule=from_csv(file(name)),
            transport=transport,
        )
        assert report.equal, str(report)


def read_by_torch(path: Path, schedule: Schedule) -> Any:
    """Let torch load a schedule, check it and add its own communication."""
    stage = SimpleNamespace(
        group_rank=0,
        group_size=schedule.num_ranks,
        num_stages=schedule.num_stages,
        stage_index=0,
        has_backward=True,
        submod=None,
    )
    theirs = _PipelineScheduleRuntime([stage], schedule.num_microbatches)
    theirs._load_csv(str(path))
    return theirs


@pytest.mark.parametrize("family", OURS, ids=str)
def test_torch_reads_what_is_written_here(family: Family, tmp_path: Path) -> None:
    num_stages = 2 * family.stages_per_rank
    schedule = family(num_stages, 4)
    path = tmp_path / "schedule.csv"
    path.write_text(to_csv(schedule))
    theirs = read_by_torch(path, schedule)
    assert theirs.stage_index_to_group_rank == dict(enumerate(schedule.ranks))
    with_theirs = tmp_path / "with_communication.csv"
    theirs._dump_csv(str(with_theirs))
    assert read_csv(path) == read_csv(with_theirs) == schedule


def test_what_torch_adds_itself_is_not_written() -> None:
    schedule = schedules.one_f_one_b(3, 4)
    lowered = add_communication(add_recompute(schedule), chain_transfers(3))
    assert to_csv(lowered) == to_csv(schedule)
