"""Plans that differ in kind: are step time, rank order and bytes predicted for each?

One GPT, a process for each rank, on this host:

    pipeline   0 ─► 1      replicas   0     shards   0 ═ 1      mixed   0 ═ 1 ─► 2 ═ 3
                                      1

python -m benchmarks.foresight.kinds --update-readme
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.foresight.main import KIB, calibrated
from benchmarks.foresight.profile_shards import profile_shards
from benchmarks.foresight.runners import Peaks, Planned, bytes_kept, step_seconds
from benchmarks.foresight.subjects import Subject
from benchmarks.report import Column, Load, Report, parser, progress, publish
from penstock import Cluster, Plan, Profile, Recompute, Transport
from penstock.planner.placement import Placement
from penstock.planner.predict import Prediction
from penstock.schedules import Family, gpipe, interleaved_1f1b, one_f_one_b

SUBJECT = Subject(kind="GPT", depth=8, width=192, side=64, batch=32)
SMALLEST = Subject(kind="GPT", depth=8, width=16, side=8, batch=16)
CLOSE = 0.02
"""Measured steps that differ by less are not in an order."""
COLUMNS = (
    Column("plan", "name"),
    Column("processes", "num_ranks"),
    Column("M", "num_microbatches"),
    Column("predicted: ms", "predicted_ms", ".1f"),
    Column("measured: ms", "measured_ms", ".1f"),
    Column("off by", "off_by", "+.1%"),
    Column("predicted place", "predicted_place"),
    Column("measured place", "measured_place"),
    Column("weights, gradients, optimizer: KiB", "state_kib", ",.0f"),
    Column("off by, worst rank", "state_off", "+.1%"),
    Column("activations: KiB", "kept_kib", ",.0f"),
    Column("off by, worst stage", "kept_off", "+.1%"),
)
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """A plan: layers of each stage, which ranks run them, in which order, how they are divided."""

    name: str
    partition: tuple[int, ...]
    placement: Placement
    num_microbatches: int
    family: Family = one_f_one_b
    recompute: Recompute = Recompute.NEVER
    sharding: str | None = None

    def plan(self, profile: Profile, batch_size: int, cluster: Cluster) -> Plan:
        """Make the plan of a model with this profile."""
        return Plan(
            layers=profile.layers,
            partition=self.partition,
            schedule=self.family,
            num_microbatches=self.num_microbatches,
            recompute=(self.recompute,) * len(self.partition),
            placement=self.placement,
            transport=Transport.TORCH_DISTRIBUTED,
            batch_size=batch_size,
            sharding=self.sharding,
            cluster=with_places(cluster, self.placement.num_ranks),
        )


def _shards(*numbers: int) -> Placement:
    """Place stages of so many shards each, one after the other."""
    ranks = iter(range(sum(numbers)))
    stages = tuple((tuple(next(ranks) for _ in range(number)),) for number in numbers)
    return Placement(stages, ("cpu",) * len(numbers))


_TWO, _TWICE_TWO = (5, 6), interleaved_1f1b(2)
KINDS = (
    Kind("2 stages", _TWO, Placement.of(range(2)), 8),
    Kind("3 stages", (4, 3, 4), Placement.of(range(3)), 8),
    Kind("2 stages, GPipe, recompute", _TWO, Placement.of(range(2)), 8, gpipe, Recompute.STAGE),
    Kind("2 x 2 stages, interleaved", (3, 2, 2, 4), Placement.of((0, 1, 0, 1)), 2, _TWICE_TWO),
    Kind("2 shards, Megatron", (11,), _shards(2), 4, sharding="megatron"),
    Kind("2 shards, samples", (11,), _shards(2), 4, sharding="data"),
    Kind("2 replicas", (11,), Placement.of(range(1), 2), 2),
    Kind("2 replicas of 2 stages", _TWO, Placement.of(range(2), 2), 4),
    Kind("2 stages of 2 shards, samples", _TWO, _shards(2, 2), 4, sharding="data"),
    Kind("1 + 2 shards, Megatron", (4, 7), _shards(1, 2), 4, sharding="megatron"),
)


def with_places(cluster: Cluster, number: int) -> Cluster:
    """Return a host with a device for each process, which share its cores."""
    (host,) = cluster.hosts
    devices = (host.devices[0],) * max(number, len(host.devices))
    return replace(cluster, hosts=(replace(host, devices=devices),))


def predicted(kind: Kind, subject: Subject, cluster: Cluster, *, busy: bool) -> Prediction:
    """Predict a plan from layers measured alone: each whole, or one device's part of it."""
    progress(f"the layers of {kind.name}")
    part = kind.num_microbatches * kind.placement.num_replicas
    whole = subject.profile((part,), busy=busy)
    plan = kind.plan(whole, subject.batch, cluster)
    assert plan.cluster is not None, "it has one"
    if kind.sharding is None:
        return Prediction(plan, whole, plan.cluster)
    inputs, targets = subject.data()
    given: dict[str, Any] = {"loss": subject.loss, "targets": targets}
    profile = profile_shards(subject.layers(), inputs, plan, plan.cluster, **given)
    return Prediction(plan, profile, plan.cluster)


def measure(kinds: Sequence[Kind], subject: Subject, rounds: int, *, smallest: bool) -> list[Row]:
    """Predict each plan, run it, and put both side by side, round after round: what a machine that
    others use can do changes within minutes, for layers as for pipelines.
    """
    seconds: dict[str, list[tuple[float, float]]] = {kind.name: [] for kind in kinds}
    told = dict[str, Prediction]()
    for _ in range(rounds):
        cluster = calibrated(smallest=smallest)
        for kind in kinds:
            own = told[kind.name] = predicted(kind, subject, cluster, busy=not smallest)
            ((found_s,),) = step_seconds({kind.name: Planned(subject, own.plan)}, 1)
            seconds[kind.name].append((own.timeline.step_s, found_s))
    rows: list[Row] = [
        {"name": name} | _row(own, seconds[name], *bytes_kept(Planned(subject, own.plan)))
        for name, own in told.items()
    ]
    for what in ("predicted", "measured"):
        for place, row in enumerate(sorted(rows, key=lambda own: own[f"{what}_ms"]), 1):
            row[f"{what}_place"] = place
    return rows


def _row(
    told: Prediction, seconds: Sequence[tuple[float, float]], kept: Peaks, states: Sequence[int]
) -> Row:
    predicted_s, measured_s = map(median, zip(*seconds, strict=True))
    predicted_bytes, placement = told.timeline.peak_bytes(), told.plan.placement
    own = [w.weight_bytes + w.gradient_bytes + w.optimizer_bytes for w in told.weights]
    predicted_states = [
        sum(own[stage] for stage in placement.stages_of(rank)) for rank in range(len(states))
    ]
    return {
        "num_ranks": placement.num_ranks,
        "num_microbatches": told.plan.num_microbatches,
        "predicted_ms": predicted_s * 1e3,
        "measured_ms": measured_s * 1e3,
        "off_by": median(one / other - 1 for one, other in seconds),
        "state_kib": max(states) / KIB,
        "state_off": _worst(predicted_states, states),
        "kept_kib": max(kept.values()) / KIB,
        "kept_off": _worst([predicted_bytes[stage] for stage in kept], [*kept.values()]),
        "predicted_bytes": predicted_bytes,
        "measured_bytes": kept,
        "predicted_state_bytes": predicted_states,
        "measured_state_bytes": states,
        "seconds": [*seconds],
        "plan": told.plan.to_json(),
    }


def _worst(told: Sequence[int], found: Sequence[int]) -> float:
    return max((a / b - 1 for a, b in zip(told, found, strict=True)), key=abs)


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """Yield lines that sum up."""
    off = [abs(row["off_by"]) for row in rows]
    yield f"- step time: median error {median(off):.1%}, worst {max(off):.1%}"
    pairs = list(combinations(sorted(rows, key=lambda own: own["measured_ms"]), 2))
    swapped = [(a, b) for a, b in pairs if a["predicted_ms"] > b["predicted_ms"]]
    apart = [(a, b) for a, b in swapped if b["measured_ms"] > a["measured_ms"] * (1 + CLOSE)]
    yield (
        f"- rank order: Kendall's tau {1 - 2 * len(swapped) / len(pairs):.2f}, "
        f"{len(swapped)} of {len(pairs)} pairs swapped, {len(apart)} of them with more than "
        f"{CLOSE:.0%} between their measured steps"
    )
    for a, b in apart:
        longer = b["measured_ms"] / a["measured_ms"] - 1
        yield f"    - {a['name']} before {b['name']}, which takes {longer:.1%} longer"
    exact = sum(row["state_off"] == 0 for row in rows)
    yield f"- weights, gradients and optimizer of every rank to the byte: {exact} of {len(rows)}"
    yield f"- activations: worst stage {max(abs(row['kept_off']) for row in rows):.1%}"


def run(options: argparse.Namespace) -> Report:
    """Calibrate, profile, predict and measure."""
    load = Load.now()
    torch.set_num_threads(1)
    smallest = options.smallest
    rounds = 1 if smallest else options.rounds
    kinds, subject = (KINDS[::3], SMALLEST) if smallest else (KINDS, SUBJECT)
    rows = measure(kinds, subject, rounds, smallest=smallest)
    settings = {
        "smallest setting": smallest,
        "rounds": rounds,
        "load before": f"{load.before:.2f}",
    }
    return Report(COLUMNS, tuple(rows), settings, (*verdicts(rows), *load.notes))


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=3, help="of all plans")
    chosen = options.parse_args(arguments)
    publish(run(chosen), chosen, Path(__file__).parent, part="kinds")


if __name__ == "__main__":
    main()
