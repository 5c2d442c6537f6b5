"""Write docs/schedules.md: each family, drawn and measured with the simulator.

python -m scripts.schedules_page            print the page
python -m scripts.schedules_page --write    replace the page
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

from penstock.errors import ConfigError
from penstock.schedules import (
    Family,
    Forward,
    Schedule,
    ir,
    one_f_one_b,
    schedule_name,
    searched,
    segmented,
)
from penstock.schedules.memory import num_versions
from penstock.schedules.names import ASYNCHRONOUS_SCHEDULES, SYNCHRONOUS_FAMILIES, by_default
from penstock.simulator import Costs, simulate
from penstock.trace.grid import render_grid

PAGE = Path(__file__).parents[1] / "docs" / "schedules.md"
RANKS, MICROBATCHES = 4, 8
"""Of the table; the grids are of fewer, so that their boxes can be read."""
DRAWN_RANKS, DRAWN_MICROBATCHES, COLUMNS = 3, 5, 118
HEAD = """# Schedules

`penstock.Pipeline(..., schedule=...)` takes any of these families from `penstock.schedules`,
written as in the table (`schedule=schedules.gpipe`, `schedule=schedules.zb_h1()`), or by name
(`"gpipe"`, `"1f1b"`, `"zb-h1"`); the default is `one_f_one_b`. Families with
parentheses take arguments, all with defaults. `costs` (`Costs`) are the seconds with which a
family fills its gaps; by default a forward takes 1 and each part of a backward takes 1.
`stages_per_rank` is the number of stages on each rank.

Each family takes any number of micro-batches M, also fewer than ranks. Its gradients equal the
unsplit model's to the bit. `num_stages` counts the stages of all ranks, so it is a multiple of
`stages_per_rank`. Three more kinds of schedule have sections at the end:

- [asynchronous schedules](#asynchronous-schedules) update weights while they run;
- [searched](#searched) schedules are made for [your own costs](searched.md);
- [segmented](#segmented) schedules cut stages further, to recompute a part at a time.

`python -m scripts.schedules_page --write` writes this page, and the simulator computes its
numbers. A forward of all stages of a rank takes 1 and its backward 2, or 1 for each of two
parts. Communication takes nothing. The table is for {ranks} ranks and {microbatches}
micro-batches.

- "Idle" is the mean share of the step in which a rank does nothing.
- "Kept" is the largest number of micro-batches in flight on a rank, over all its layers. On a
  V, one micro-batch on one stage of two counts as a half.
- "Step" is the length for R ranks and M micro-batches with v stages on each rank, from the
  named M on. The tests compare it with the simulator, for all R <= 8 and M <= 16.

| schedule | stages on a rank | idle | kept | step | from M |
| --- | --- | --- | --- | --- | --- |
"""
STEPS = {
    "gpipe": ("3 M + 3 (R - 1)", "1"),
    "one_f_one_b": ("3 M + 3 (R - 1)", "1"),
    "eager_1f1b": ("3 M + 3 (R - 1)", "1"),
    "zb_h1": ("3 M + R - 1", "R"),
    "zb_h2": ("3 M + R - 1", "R"),
    "interleaved_1f1b": ("3 M + 3 (R - 1) / v", "R, its multiples"),
    "breadth_first": ("3 M + 3 (R - 1) / v", "R"),
    "wave": ("3 M + 3 (R - 1) / v for v <= 2", "2 R"),
    "zb_v": ("3 M + (R - 1) / 2", "R"),
    "v_half": ("at most 3 M + 3 (R - 1) / 2", "R"),
    "v_min": ("at most 3 M + 2 R - 1.5", "R"),
    "dualpipe_v": ("3 M + (R - 1) / 2", "2 R"),
    "critical_path": ("3 M + R - 1", "R"),
}
"""How long a step is, and from how many micro-batches on."""
MINIBATCHES, DRAWN_MINIBATCHES, DRAWN_OF_MINIBATCH = 8, 3, 2
"""Of asynchronous families."""
ASYNCHRONOUS = """## Asynchronous schedules

Mini-batches follow each other without a flush, and each stage updates its own weights while
others work. Gradients belong to older weights. [asynchronous.md](asynchronous.md) describes the
result and its cost. The table is for {ranks} ranks and {minibatches} mini-batches of
{microbatches} micro-batches. "Versions" is the largest number of versions of its weights on a
stage. A window of W mini-batches takes 3 W M + 3 (R - 1) (`pipedream_2bw`: from M = R - 1 on).
An update takes nothing and is not in the grids. The programs below them write it as `0U`.
`0F3@1` is a forward with the weights after one update.

| schedule | stages on a rank | idle | kept | versions |
| --- | --- | --- | --- | --- |
"""
SEARCHED_COSTS = Costs(
    forward_s=(1, 2, 1),
    backward_s=(2, 4, 3),
    backward_input_s=(1, 2, 2),
    backward_weight_s=(1, 2, 1),
    recompute_s=(1, 2, 1),
)


def page() -> str:
    """Give the page."""
    given = [(x, by_default(x)) for x in SYNCHRONOUS_FAMILIES]
    rows = "".join(_row(family) for _, family in given)
    sections = "\n".join("\n".join(_section(x, family)) for x, family in given)
    head = HEAD.format(ranks=RANKS, microbatches=MICROBATCHES) + rows + "\n"
    other = "\n".join((*_searched(), *_segmented()))
    return head + sections + "\n" + _asynchronous() + other


def _costs(family: Family) -> Costs:
    """Give costs of a stage with which all stages of a rank take 1 forward and 2 backward."""
    part = Fraction(1, family.stages_per_rank)
    return Costs(forward_s=part, backward_s=2 * part, recompute_s=part)


def _made(family: Family, num_ranks: int, num_microbatches: int) -> Schedule:
    return family(num_ranks * family.stages_per_rank, num_microbatches)


def _asynchronous() -> str:
    text = ASYNCHRONOUS.format(ranks=RANKS, microbatches=MICROBATCHES, minibatches=MINIBATCHES)
    for family in ASYNCHRONOUS_SCHEDULES:
        schedule = family(RANKS, MICROBATCHES, MINIBATCHES)
        idle = float(simulate(schedule, _costs(family)).bubble)
        versions = max(num_versions(schedule))
        text += f"| `{family!r}` | 1 | {idle:.1%} | {_kept(schedule)} | {versions} |\n"
    for family in ASYNCHRONOUS_SCHEDULES:
        schedule = family(DRAWN_RANKS, DRAWN_OF_MINIBATCH, DRAWN_MINIBATCHES)
        grid = render_grid(simulate(schedule, _costs(family)), COLUMNS)
        where = f"{DRAWN_MINIBATCHES} mini-batches of {DRAWN_OF_MINIBATCH} micro-batches"
        text += f"\n### {family!r}\n\n{_said(family)}\n\nOn {DRAWN_RANKS} ranks, with {where}:\n\n"
        text += f"```text\n{grid}\n\n{schedule}\n```\n"
    return text + "\n"


def _searched() -> Iterator[str]:
    """Write what a search gives for stages that are not alike, beside 1F1B."""
    told = (inspect.getdoc(searched) or "").split("\n\n")
    yield from ("## searched", "", inspect.getdoc(inspect.getmodule(searched)) or "", "")
    yield "\n\n".join(text for text in told if text.startswith(("Stages lie", "The schedule is")))
    yield ""
    yield "[searched.md](searched.md) shows how to measure costs and to set a limit."
    yield ""
    costs = SEARCHED_COSTS
    yield (
        f"On {DRAWN_RANKS} ranks, with {DRAWN_MICROBATCHES} micro-batches: forwards of the stages "
        f"take {costs.forward_s}, backwards\n{costs.backward_s}, or in two parts "
        f"{costs.backward_input_s} and {costs.backward_weight_s}. First 1F1B, then the search."
    )
    for family in (one_f_one_b, searched(costs)):
        grid = render_grid(simulate(family(DRAWN_RANKS, DRAWN_MICROBATCHES), costs), COLUMNS)
        yield from ("", "```text", grid, "```")
    yield ""


def _segmented() -> Iterator[str]:
    """Write what its file says of a segmented family, and its grid."""
    told = (inspect.getdoc(segmented) or "").split("\n\n")
    sizes = (2,) * DRAWN_RANKS
    schedule = segmented(sizes)(sum(sizes), DRAWN_MICROBATCHES)
    half = Fraction(1, 2)
    grid = render_grid(simulate(schedule, Costs(forward_s=half, backward_s=2 * half)), COLUMNS)
    yield from ("## segmented", "", inspect.getdoc(inspect.getmodule(segmented)) or "", "")
    yield "\n\n".join(text for text in told if text.startswith(("A segment", "The step")))
    yield f"\nOn {DRAWN_RANKS} ranks, with {DRAWN_MICROBATCHES} micro-batches and `sizes={sizes}`:"
    yield from ("", "```text", grid, "```", "")


def _kept(schedule: Schedule) -> int:
    """Count the most micro-batches that a rank keeps something of, on each stage."""
    return max(
        live
        for program in schedule.programs
        for live in accumulate(
            isinstance(x, Forward) - isinstance(x, ir.ADDS_GRADIENTS) for x in program
        )
    )


def _row(family: Family) -> str:
    schedule = _made(family, RANKS, MICROBATCHES)
    idle = float(simulate(schedule, _costs(family)).bubble)
    kept = _kept(schedule)
    step, since = STEPS[family.name]
    return (
        f"| [`{family!r}`](#{family.name}) | {family.stages_per_rank} | {idle:.1%} "
        f"| {kept / family.stages_per_rank:g} | {step} | {since} |\n"
    )


def _said(family: Family) -> str:
    """Return what its file says of a family: all but the paragraphs of other families there."""
    paragraphs = (inspect.getdoc(inspect.getmodule(family.build)) or "").split("\n\n")
    return "\n\n".join(x for x in paragraphs if _family_in(x) in (None, family.name))


def _family_in(paragraph: str) -> str | None:
    """Return the name of the family with whose title a paragraph begins, if it does."""
    with suppress(ConfigError):
        return schedule_name(paragraph.partition(":")[0])
    return None


def _section(given: Family | Callable[..., Family], family: Family) -> Iterator[str]:
    """Write what its file says of it, what it promises, and its grid."""
    yield f"## {family.name}"
    yield ""
    yield _said(family)
    yield ""
    told = inspect.getdoc(family.build if given is family else given) or ""
    for paragraph in told.split("\n\n")[1:]:
        is_drawn = paragraph.startswith(("    ", "rank ", "p = ", "Calling", "Raises"))
        if not is_drawn and "m = " not in paragraph.splitlines()[-1]:
            yield paragraph
            yield ""
    schedule = _made(family, DRAWN_RANKS, DRAWN_MICROBATCHES)
    yield f"On {DRAWN_RANKS} ranks, with {DRAWN_MICROBATCHES} micro-batches:"
    yield ""
    yield "```text"
    yield render_grid(simulate(schedule, _costs(family)), COLUMNS)
    yield "```"
    yield ""


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page())
    else:
        print(page(), end="")
