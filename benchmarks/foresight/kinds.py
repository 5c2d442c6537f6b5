"""Layouts and models through `penstock.parallelize`: is the step what its own plan predicts?

    pipeline=2   0 ─► 1      data=2   0      tensor=2   0 ═ 1      a model: the layout is searched
                                      1

Each case runs in two processes of its own, which plan, build and train as a user's job does.

python -m benchmarks.foresight.kinds --update-readme
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed as dist

import penstock
from benchmarks.foresight.hugging_face import MODELS, hugging_face
from benchmarks.foresight.subjects import Subject
from benchmarks.report import Column, Load, Report, parser, progress, publish
from benchmarks.throughput.processes import Key, Part, Processes
from penstock import Parallelism, Pipeline

SUBJECT = Subject(kind="GPT", depth=8, width=192, side=64, batch=32)
SMALLEST = Subject(kind="GPT", depth=4, width=16, side=8, batch=16)
NUM_PROCESSES, NUM_WARM_UPS, NUM_STEPS = 2, 2, 5
CLOSE = 0.02
"""Measured steps that differ by less are not in an order."""
RUN: Key = ("run", 0)
COLUMNS = (
    Column("model", "model"),
    Column("layout", "layout"),
    Column("plan", "plan_text"),
    Column("predicted: ms", "predicted_ms", ".1f"),
    Column("measured: ms", "measured_ms", ".1f"),
    Column("off by", "off_by", "+.1%"),
    Column("planned in: s", "planned_s", ".1f"),
)
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and the layout in which it runs; None: `parallelize` searches one."""

    model: Subject | str
    layout: Mapping[str, Any] | None = None

    @property
    def words(self) -> tuple[str, str]:
        """The model's name, and the layout in words."""
        name = self.model if isinstance(self.model, str) else self.model.kind
        return name, "searched" if self.layout is None else str(Parallelism(**self.layout))

    def parts(self) -> tuple[Any, Any, Any, Callable[[Any, Any], Any]]:
        """Return the model, a batch, its targets and the loss."""
        if isinstance(self.model, str):
            return hugging_face(self.model)
        return self.model.layers(), *self.model.data(), self.model.loss


def layouts(subject: Subject) -> list[Case]:
    """Return ten plans of one model, of all kinds that two processes can run."""
    given: Sequence[tuple[int, Mapping[str, Any]]] = (
        (8, {"pipeline": 2}),
        (8, {"pipeline": 2, "schedule": "gpipe", "recompute": "stage"}),
        (4, {"pipeline": 2, "recompute": "layers"}),
        (4, {"pipeline": 2, "virtual": 2}),
        (4, {"tensor": 2}),
        (4, {"tensor": 2, "sequence": True}),
        (2, {"data": 2}),
        (2, {"data": 2, "zero": 1}),
        (2, {"data": 2, "zero": 3}),
    )
    cases = []
    for number, words in given:
        size = subject.batch // number // words.get("data", 1)
        cases.append(Case(subject, {**words, "num_microbatches": number, "microbatch_size": size}))
    return [*cases, Case(subject)]


def prepare(rank: int, case: Case, _: tuple[int, ...]) -> dict[Key, Part]:
    """Plan and build, in one of the processes, its part of the pipeline."""
    model, inputs, targets, loss = case.parts()
    start_s = time.perf_counter()
    layout = None if case.layout is None else Parallelism(**case.layout)
    pipe = penstock.parallelize(model, inputs, loss=loss, parallelism=layout)
    planned_s = time.perf_counter() - start_s
    return {RUN: Part(partial(_run, pipe, inputs, targets, planned_s), {})}


def _run(pipe: Pipeline, inputs: Any, targets: Any, planned_s: float) -> Row:
    """Train, and return what this process took, and what its plan predicts."""
    optimizer = torch.optim.AdamW(pipe.parameters()) if [*pipe.parameters()] else None
    steps_s = []
    for _ in range(NUM_WARM_UPS + NUM_STEPS):
        dist.barrier()
        start_s = time.perf_counter()
        pipe.zero_grad()
        pipe.train_step(inputs, targets)
        if optimizer is not None:
            optimizer.step()
        steps_s.append(time.perf_counter() - start_s)
    plan = pipe.plan
    return {
        "predicted_s": plan.predicted_step_s,
        "planned_s": planned_s,
        "steps_s": steps_s[NUM_WARM_UPS:],
        "plan_text": plan_text(pipe),
        "plan": plan.to_json(),
    }


def plan_text(pipe: Pipeline) -> str:
    """Return the layers of stages, the ranks, the ready plan and the number of micro-batches."""
    plan = pipe.plan
    stages = "+".join(map(str, plan.partition))
    divided = "" if plan.sharding is None else f", {getattr(plan.sharding, 'name', plan.sharding)}"
    ranks = f"{plan.placement.num_ranks} ranks"
    return f"{stages} layers on {ranks}{divided}, M {plan.num_microbatches}"


def measure(cases: Sequence[Case], rounds: int) -> list[Row]:
    """Plan and run each case in turn, round after round."""
    found: dict[int, list[list[Row]]] = {number: [] for number in range(len(cases))}
    for _ in range(rounds):
        for number, case in enumerate(cases):
            processes = Processes(prepare, case, (), NUM_PROCESSES)
            try:
                found[number].append(processes.results(RUN))
            finally:
                processes.close()
            progress(f"{' '.join(case.words)}: {_seconds(found[number][-1])}")
    return [_row(cases[number], of_rounds) for number, of_rounds in found.items()]


def _seconds(ranks: Sequence[Row]) -> tuple[float, float]:
    """Return the predicted seconds of a step, and the median of what its slowest process took."""
    steps_s = map(max, zip(*(own["steps_s"] for own in ranks), strict=True))
    return ranks[0]["predicted_s"], median(steps_s)


def _row(case: Case, rounds: Sequence[Sequence[Row]]) -> Row:
    pairs, last = [_seconds(ranks) for ranks in rounds], rounds[-1]
    predicted_s, measured_s = map(median, zip(*pairs, strict=True))
    return {
        **dict(zip(("model", "layout"), case.words, strict=True)),
        "plan_text": last[0]["plan_text"],
        "predicted_ms": predicted_s * 1e3,
        "measured_ms": measured_s * 1e3,
        "off_by": median(one / other - 1 for one, other in pairs),
        "planned_s": median(ranks[0]["planned_s"] for ranks in rounds),
        "seconds": pairs,
        "plan": last[0]["plan"],
    }


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """Yield lines that sum up."""
    for name, some in (
        ("all", rows),
        ("given layouts", [r for r in rows if r["layout"] != "searched"]),
    ):
        off = [abs(row["off_by"]) for row in some]
        yield f"- {name}, {len(off)}: median error {median(off):.1%}, worst {max(off):.1%}"
    pairs = list(combinations(sorted(rows, key=lambda own: own["measured_ms"]), 2))
    swapped = [(a, b) for a, b in pairs if a["predicted_ms"] > b["predicted_ms"]]
    apart = [(a, b) for a, b in swapped if b["measured_ms"] > a["measured_ms"] * (1 + CLOSE)]
    yield (
        f"- rank order: Kendall's tau {1 - 2 * len(swapped) / len(pairs):.2f}, "
        f"{len(swapped)} of {len(pairs)} pairs swapped, {len(apart)} of them with more than "
        f"{CLOSE:.0%} between their measured steps"
    )


def run(options: argparse.Namespace) -> Report:
    """Plan and measure."""
    load = Load.now()
    torch.set_num_threads(1)
    smallest = options.smallest
    rounds = 1 if smallest else options.rounds
    cases = layouts(SMALLEST)[::4] if smallest else [*layouts(SUBJECT), *map(Case, MODELS)]
    rows = measure(cases, rounds)
    settings = {
        "smallest setting": smallest,
        "rounds": rounds,
        "load before": f"{load.before:.2f}",
    }
    return Report(COLUMNS, tuple(rows), settings, (*verdicts(rows), *load.notes))


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=3, help="of all cases")
    chosen = options.parse_args(arguments)
    publish(run(chosen), chosen, Path(__file__).parent, part="kinds")


if __name__ == "__main__":
    main()
