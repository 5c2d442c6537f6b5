"""Read and write schedules in the CSV form of torch.distributed.pipelining.

One line a rank, one cell an action, empty where the rank is idle:

    0F0,0F1,,0B0,0B1            F a forward, B a backward; I and W its two parts,
    ,1F0,1B0,1F1,1B1            of the inputs and of the weights
"""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from penstock.errors import ConfigError, ScheduleError, shown

from . import ir
from .family import Family
from .ir import Instruction, Schedule
from .laws import verify
from .passes import add_communication
from .transfers import chain_transfers

_KINDS: Mapping[str, type[ir.Compute]] = {
    "F": ir.Forward,
    "B": ir.Backward,
    "I": ir.BackwardInput,
    "W": ir.BackwardWeight,
}
_LETTERS: Mapping[type[Instruction], str] = {kind: letter for letter, kind in _KINDS.items()}
_ACTION = re.compile(r"([0-9]+)([FBIW])([0-9]+)")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_LEFT_OUT = re.compile(r"[0-9]+((SEND|RECV)_[FB][0-9]+|UNSHARD|RESHARD|REDUCE_GRAD)")
_SHOWN_CHARACTERS = 40
"""Characters of a cell that an error shows."""


def from_csv(source: str | Path) -> Family:
    """Return the schedule in a CSV file, or in the text of one, as a family of one size.

        Pipeline(layers, num_stages=4, schedule=schedules.from_csv("mine.csv"))

    The family takes the number of stages in the file, and the number of micro-batches there or
    fewer, as a smaller last batch may need.  Those beyond are struck out.

    Raises:
        ScheduleError: the file cannot be read, a cell is no action, or together they are no valid
            schedule.
    """
    if not isinstance(source, str | Path):
        raise ScheduleError(
            f"from_csv({shown(source)}): give the path of a CSV file, or the text of one"
        )
    schedule = read_csv(source)
    per_rank, rest = divmod(schedule.num_stages, schedule.num_ranks)
    return Family(
        "from_csv",
        _schedule,
        stages_per_rank=1 if rest else per_rank,
        arguments=(("source", to_csv(schedule)),),
        deal=_Deal(schedule.ranks),
        most_microbatches=schedule.num_microbatches,
    )


def read_csv(source: str | Path) -> Schedule:
    """Read a schedule from a CSV file, or from the text of one, and prove it.

    An empty string, or one with a comma or a line end, is the text; any other is a path.  Forwards
    and backwards count, those of an OVERLAP_F_B one after the other.  Sends, receives and actions
    for sharded weights are left out: passes add the communication of a pipeline.

    Raises:
        ScheduleError: the file cannot be read, a cell is no action, or together they are no valid
            schedule.
    """
    if source == "" or (isinstance(source, str) and not {",", "\n"}.isdisjoint(source)):
        return _read(source)
    try:
        return _read(Path(source).read_text(encoding="utf-8"))
    except OSError as error:
        raise ScheduleError(
            f"{source}: {error.strerror}; give the path of a CSV file, or the text of one: that "
            "has a comma or the end of a line in it"
        ) from None
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{source} is no text, and so no CSV file: {error}") from None


def to_csv(schedule: Schedule) -> str:
    """Write the forwards and backwards of a schedule, one line a rank.

    Everything else is left out: torch adds sends, receives and reductions itself, and recomputes
    nothing.

    Raises:
        ConfigError: it is a family, of any size.
        ScheduleError: it updates weights, for which the form has no word.
    """
    # 1. Refuse what the form cannot say.
    if not isinstance(schedule, Schedule):
        raise ConfigError(
            f"{schedule!r:.80} is no schedule of one size: call the family, "
            "to_csv(family(num_stages, num_microbatches))"
        )
    for rank, x in schedule:
        if isinstance(x, ir.UpdateWeights) or (isinstance(x, ir.Forward) and x.version):
            raise ScheduleError(
                f"rank {rank}, {x}: weights are updated within the schedule, and the CSV form has "
                "no word for that; write the text form instead, str(schedule)"
            )
    # 2. Write a cell for each instruction that torch knows.
    rows = (
        (
            f"{x.stage}{_LETTERS[type(x)]}{x.microbatch}"
            for x in program
            if isinstance(x, ir.Compute) and type(x) in _LETTERS
        )
        for program in schedule.programs
    )
    return "".join(",".join(row) + "\n" for row in rows)


@dataclass(frozen=True, slots=True)
class _Deal:
    """The rank of each stage of a file."""

    ranks: tuple[int, ...]

    def __call__(self, num_stages: int, num_ranks: int) -> tuple[int, ...]:
        _check_size("stages", num_stages, len(self.ranks), exactly=True)
        return self.ranks


def _schedule(num_stages: int, num_microbatches: int, source: str) -> Schedule:
    """Strike out the micro-batches beyond those asked for."""
    whole = _read(source)
    _check_size("stages", num_stages, whole.num_stages, exactly=True)
    _check_size("micro-batches", num_microbatches, whole.num_microbatches, exactly=False)
    return Schedule.of(
        (x for x in program if isinstance(x, ir.Compute) and x.microbatch < num_microbatches)
        for program in whole.programs
    )


def _check_size(noun: str, wanted: int, count: int, *, exactly: bool) -> None:
    if wanted > count or (exactly and wanted != count):
        raise ConfigError(
            f"the schedule that was read as CSV has {count} {noun}, and {wanted} were asked for: "
            f"make it {count}{'' if exactly else ' or fewer'}, or read another schedule"
        )


@lru_cache(maxsize=8)
def _read(text: str) -> Schedule:
    """Read a schedule and prove it, for stages of which each feeds the next."""
    # 1. divide the text into cells; programs that write tables may put a byte-order mark first
    reader = csv.reader(text.removeprefix("\ufeff").rstrip().splitlines())
    try:
        rows = list(reader)
    except csv.Error as error:  # a cell is too long
        raise ScheduleError(f"line {reader.line_num}: it is no row of actions: {error}") from None

    # 2. read the actions, a program for each line
    programs: list[list[Instruction]] = [[] for _ in rows]
    lines: dict[int, int] = {}
    seen: set[Instruction] = set()
    for spot, x in _actions(rows):
        line = lines.setdefault(x.stage, spot.line)
        if line != spot.line:
            raise spot.fault(f"stage {x.stage} runs in line {line} too, and a line is a rank")
        if x in seen:
            raise spot.fault("it comes twice")
        seen.add(x)
        programs[spot.line - 1].append(x)
    if not all(programs):
        line = 1 + programs.index([])
        raise ScheduleError(f"line {line} has no action: each line is a rank, and runs a stage")

    # 3. prove the schedule with its communication
    schedule = Schedule.of(programs)
    transfers = chain_transfers(schedule.num_stages)
    try:
        verify(add_communication(schedule, transfers), transfers)
    except ScheduleError as error:
        raise ScheduleError(f"the CSV schedule, with rank r in line r + 1: {error}") from None
    return schedule


class _Spot(NamedTuple):
    """A cell with its line and its place in the line, both from 1 on."""

    text: str
    line: int
    cell: int

    def fault(self, problem: str) -> ScheduleError:
        text = self.text
        if len(text) > _SHOWN_CHARACTERS:
            text = f"{text[:_SHOWN_CHARACTERS]}..."
        return ScheduleError(f"line {self.line}, cell {self.cell}, {text!r}: {problem}")


def _actions(rows: list[list[str]]) -> Iterator[tuple[_Spot, ir.Compute]]:
    """Yield each forward and backward with its cell; a cell of a pair has two."""
    most = sum(1 + cell.count(";") for row in rows for cell in row)
    for line, row in enumerate(rows, 1):
        for number, cell in enumerate(row, 1):
            spot = _Spot(cell, line, number)
            pair = _PAIR.fullmatch(cell.strip())
            for word in pair[1].split(";") if pair else [cell]:
                yield from ((spot, x) for x in _parsed(word.strip(), spot, most))


def _parsed(word: str, spot: _Spot, most: int) -> Iterator[ir.Compute]:
    """Yield the instruction of a word, whose numbers are below `most`; none if it is left out."""
    action = _ACTION.fullmatch(word)
    if action:
        stage, letter, microbatch = action.groups()
        for noun, digits in (("stage", stage), ("micro-batch", microbatch)):
            if len(digits.lstrip("0")) > len(str(most)) or int(digits) >= most:
                raise spot.fault(
                    f"there is no {noun} of this number, since they count from 0 without a gap, "
                    f"and all lines together have {most:,} cells"
                )
        yield _KINDS[letter](int(stage), int(microbatch))
    elif word and not _LEFT_OUT.fullmatch(word):
        raise spot.fault(
            "it is no action; expected a stage, one of F, B, I and W, and a micro-batch, as 1F0"
        )
