"""Partition, placement and schedule together: is the list plan as much faster as predicted?

A model whose first and last layers are far heavier than its blocks, on two cores, a thread
for each rank: the best plan of all named schedules, and what the planner finds when it may
make list schedules as well. Both run in turn, in one process.

python -m benchmarks.foresight.together
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

from torch import nn

import penstock
from benchmarks.blocks import transformer
from benchmarks.foresight.main import answer, of_one_model
from benchmarks.foresight.subjects import Subject
from benchmarks.report import Column, interleaved, progress
from penstock import Pipeline, Plan
from penstock.planner.candidates import Constraints
from penstock.schedules import critical_path
from penstock.schedules.names import SYNCHRONOUS_FAMILIES, by_default

NUM_RANKS = 2
FIRST, BLOCKS, LAST = 4, 12, 8
"""Blocks of the first layer, layers of one block, and blocks of the last layer."""
COLUMNS = (
    Column("M", "num_microbatches"),
    Column("plan", "name"),
    Column("layers of each", "partition"),
    Column("ranks", "ranks"),
    Column("schedule", "schedule"),
    Column("predicted: ms", "predicted_ms", ".1f"),
    Column("measured: ms", "measured_ms", ".1f"),
    Column("predicted gain", "predicted_gain", ".3f"),
    Column("measured gain", "measured_gain", ".3f"),
)


def layers(subject: Subject) -> list[nn.Module]:
    """Build the model."""
    blocks = list(transformer(FIRST + BLOCKS + LAST, subject.width, 4))
    first, last = nn.Sequential(*blocks[:FIRST]), nn.Sequential(*blocks[-LAST:])
    return [first, *blocks[FIRST:-LAST], last]


def stepping(plan: Plan, subject: Subject) -> tuple[Pipeline, Callable[[], float]]:
    """Make a pipeline, and what runs a step of it and returns its seconds."""
    pipe = Pipeline(layers(subject), plan=plan, loss=subject.loss)
    inputs, targets = subject.data()

    def step() -> float:
        pipe.zero_grad()
        start_s = time.perf_counter()
        pipe.train_step(inputs, targets)
        return time.perf_counter() - start_s

    return pipe, step


def measure(
    subject: Subject, cluster: penstock.Cluster, num_microbatches: int, rounds: int
) -> list[dict[str, Any]]:
    """Plan with and without list schedules, and run both plans in turn."""
    progress(f"M = {num_microbatches}")
    inputs, targets = subject.data()
    profile = penstock.profile(
        layers(subject),
        inputs,
        loss=subject.loss,
        targets=targets,
        microbatch_sizes=[subject.batch // num_microbatches],
        threads=1,
        busy=True,
    )
    names = tuple(by_default(given).name for given in SYNCHRONOUS_FAMILIES)
    named = tuple(name for name in names if name != critical_path.__name__)
    plans = {}
    for name, schedules in (("named", named), ("together", names)):
        asked = Constraints(
            batch_size=subject.batch,
            num_ranks=NUM_RANKS,
            num_replicas=1,
            num_microbatches=num_microbatches,
            schedules=schedules,
        )
        plans[name] = penstock.plan(profile, cluster, subject.batch, constraints=asked)
    made = [stepping(plan, subject) for plan in plans.values()]
    found_s = interleaved([step for _, step in made], rounds)
    for pipe, _ in made:
        pipe.close()
    told_s = {name: penstock.simulate(profile, cluster, x).step_s for name, x in plans.items()}
    return [
        {
            "num_microbatches": num_microbatches,
            "name": name,
            "partition": "-".join(map(str, plan.partition)),
            "ranks": "-".join(map(str, plan.placement.places)),
            "schedule": plan.schedule.name,
            "predicted_ms": told_s[name] * 1e3,
            "measured_ms": median(its_s) * 1e3,
            "predicted_gain": told_s["named"] / told_s[name],
            "measured_gain": median(a / b for a, b in zip(found_s[0], its_s, strict=True)),
            "seconds": list(its_s),
        }
        for (name, plan), its_s in zip(plans.items(), found_s, strict=True)
    ]


def both(subject: Subject, cluster: penstock.Cluster, rounds: int) -> Iterator[dict[str, Any]]:
    """Measure with few micro-batches and with more."""
    for num_microbatches in (2, 4):
        yield from measure(subject, cluster, num_microbatches, rounds)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    answer(__doc__ or "", partial(of_one_model, COLUMNS, both), arguments, rounds=9)


if __name__ == "__main__":
    main()
