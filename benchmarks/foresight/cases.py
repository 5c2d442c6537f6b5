"""What is predicted and run: a model, a schedule, sizes, and where the ranks are."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks.all_pairs import all_pairs
from benchmarks.foresight.subjects import Subject
from penstock import Cluster, Plan, Profile, Recompute, Transport
from penstock.planner.cuts import cuts, sums
from penstock.planner.placement import Placement
from penstock.planner.predict import Prediction
from penstock.planner.pricing import Pricing
from penstock.schedules import Family
from penstock.schedules.costs import UNIT_COSTS
from penstock.schedules.names import families_for


@dataclass(frozen=True, slots=True)
class Case:
    """One pipeline; `stages_per_rank` is what the schedule has."""

    subject: Subject
    family: str
    stages_per_rank: int
    num_ranks: int
    num_microbatches: int
    processes: bool
    recompute: Recompute

    @property
    def name(self) -> str:
        """What tells it from the others."""
        where = "processes" if self.processes else "threads"
        return f"{self.subject.kind}, {self.short}, {where}"

    @property
    def short(self) -> str:
        """What tells it from others of the model where it is run alike."""
        sizes = f"K {self.num_ranks}, M {self.num_microbatches}"
        return f"{self.family}, {sizes}, {self.recompute.name}"

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.num_ranks * self.stages_per_rank

    def plan(self, profile: Profile, cluster: Cluster) -> Plan:
        """Cut the model by measured time; schedules that are made for costs get the profile's."""
        pricing = Pricing(profile, cluster)
        size = self.subject.batch // self.num_microbatches
        seconds = pricing.seconds(cluster.places[0].kind, size, self.num_microbatches)
        costs = sums([layer.forward_s + layer.backward_s for layer in seconds])
        partition, *_ = cuts(self.num_stages, lambda stage: costs, profile.spans)

        def with_schedule(family: Family) -> Plan:
            return Plan(
                layers=profile.layers,
                partition=partition,
                schedule=family,
                num_microbatches=self.num_microbatches,
                recompute=(self.recompute,) * self.num_stages,
                placement=Placement.of(family.ranks(self.num_stages)),
                transport=Transport.TORCH_DISTRIBUTED if self.processes else Transport.THREADS,
                batch_size=self.subject.batch,
            )

        first = with_schedule(_named(self.family, self.stages_per_rank))
        told = Prediction(first, profile, cluster).costs
        made = {f.name: f for f in families_for(told, self.stages_per_rank)}
        return with_schedule(made[self.family])


def _named(name: str, stages_per_rank: int) -> Family:
    return next(f for f in families_for(UNIT_COSTS, stages_per_rank) if f.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to choose of: an entry for each value of a factor."""

    subjects: Sequence[Subject]
    families: Sequence[tuple[str, int]]
    num_ranks: Sequence[int]
    num_microbatches: Sequence[int]
    processes: Sequence[bool]
    recompute: Sequence[Recompute] = tuple(Recompute)

    def cases(self, *, everything: bool) -> list[Case]:
        """Return every case, or few in which every two values meet."""
        factors = (
            self.subjects,
            self.families,
            self.num_ranks,
            self.num_microbatches,
            self.processes,
            self.recompute,
        )

        def is_possible(choice: tuple[Any, ...]) -> bool:
            return _case(choice).num_ranks > 1 or not _case(choice).processes

        every = filter(is_possible, product(*factors))
        chosen = every if everything else all_pairs(factors, is_possible=is_possible)
        return list(map(_case, chosen))


def _case(choice: tuple[Any, ...]) -> Case:
    subject, (family, stages_per_rank), *rest = choice
    return Case(subject, family, stages_per_rank, *rest)


def every_family() -> list[tuple[str, int]]:
    """Return the synchronous schedules by name, with how many stages of theirs a rank has.

    Two where a schedule can have several: with one, interleaved 1F1B is 1F1B.
    """
    found = {f.name: count for count in (1, 2) for f in families_for(UNIT_COSTS, count)}
    return list(found.items())
