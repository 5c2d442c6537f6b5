"""The table of tested models in the documentation.

As `python -m tests.model.capture.any_models.table`, with these arguments:

(none)                           print it
--update docs/models.md          run every model, and write it there
--update docs/models.md NAME ... only these rows
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers

from penstock.model.capture.captured import Captured, record_model
from penstock.model.capture.inputs import ROUTED
from penstock.model.capture.routes import holders, stages_of_events
from tests.model.capture.any_models.lists import EVERY, ODD, OTHERS, RECENT, REFUSED, REQUIRED
from tests.model.capture.any_models.made import AnyModel
from tests.model.capture.running import BATCH, WAYS, Tensors, assert_close, differing, run, whole

BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"
HEAD = (
    "| model | blocks (calls) | parameters | train | eval | values at a cut | bytes at a cut "
    "| notes |\n"
    "|---|--:|--:|---|---|--:|--:|---|\n"
)
TITLES = {"The models that must work": REQUIRED, "Others": OTHERS}
TITLES |= {"Models of 2026": RECENT, "Odd models, and odd uses": ODD}


def facts(model: AnyModel) -> list[str]:
    """Give what a capture tells of a model: blocks, parameters, what crosses the cuts."""
    made, inputs_of = model.make()
    with model.within():
        captured = record_model(made, inputs_of(BATCH))
    live = captured.live_bytes()[1:]
    counts = [_num_values(captured, cut) for cut in range(1, len(captured.calls))]
    return [
        f"{len(captured.blocks)} ({len(captured.calls)})",
        f"{sum(parameter.numel() for parameter in made.parameters()):,}",
        _span(counts),
        _span(live),
    ]


def _num_values(captured: Captured, cut: int) -> int:
    stage_of = {call: int(place >= cut) for place, call in enumerate(captured.calls)}
    return max(
        sum(at == (0, 1) for at in holders(stages_of_events(of_mode.events, stage_of, 2)).values())
        for of_mode in captured.recorded
    )


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def row(model: AnyModel) -> str:
    """Run a model in every way, and say how it compares with the whole one."""
    expected = whole(model)
    found = [run(model, way) for way in WAYS if not model.routed or way.inputs == ROUTED]
    training = _verdict([(f.in_training, expected.in_training) for f in found])
    evaluation = _verdict(
        [(f.outputs, expected.outputs) for f in found]
        + [(f.in_evaluation, expected.in_evaluation) for f in found]
    )
    blocks, parameters, values, num_bytes = facts(model)
    notes = "; ".join(part for part in (model.note, model.rounding) if part)
    cells = (model.name, blocks, parameters, training, evaluation, values, num_bytes, notes)
    return f"| {' | '.join(cells)} |\n"


def _verdict(pairs: list[tuple[Tensors, Tensors]]) -> str:
    if not any(differing(found, expected) for found, expected in pairs):
        return "bit"
    for found, expected in pairs:
        assert_close(found, expected)
    return "close"


def table(only: Sequence[str], before: str) -> Iterator[str]:
    """Give the tables, with rows as they were `before` of all models but `only` these."""
    old = {line.split(" | ")[0]: f"{line}\n" for line in before.splitlines()}
    yield f"torch {torch.__version__}, transformers {transformers.__version__}\n"
    for title, models in TITLES.items():
        yield f"\n### {title}\n\n{HEAD}"
        for model in models:
            known = old.get(f"| {model.name}")
            yield known if known and only and model.name not in only else row(model)
    yield "\n### Refused\n\n| model | error |\n|---|---|\n"
    for refused in REFUSED:
        yield f"| {refused.name} | {refused.error.__name__} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", type=Path)
    parser.add_argument("names", nargs="*", choices=[[], *(model.name for model in EVERY)])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    before = asked.update.read_text() if asked.update else ""
    lines = []
    for line in table(asked.names, before):
        lines.append(line)
        sys.stdout.write(line)
        sys.stdout.flush()
    if asked.update:
        head, _, rest = before.partition(BEGIN)
        tail = rest.partition(END)[2]
        asked.update.write_text(f"{head}{BEGIN}\n{''.join(lines)}{END}{tail}")


if __name__ == "__main__":
    main()
