"""A candidate of a plan on meshes: lower bounds of its step, and what the simulator is given."""

from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

from penstock.schedules import segmented
from penstock.schedules.costs import Costs
from penstock.schedules.family import Family
from penstock.schedules.lower import Lowering, lower_unproved
from penstock.schedules.transfers import Transfer
from penstock.simulator.engine import Compiled, compiled
from penstock.trace.units import count_text, time_text

from .mesh_costs import MeshPrices, OnMesh
from .stage_table import Task
from .stage_work import made, work_of
from .submeshes import Answer
from .unsplit import divides_backwards

_FEW_STAGES = 4
"""Up to which each is described."""


_FEW = 4
"""Micro-batches per stage after which the number in flight stops growing."""


class Candidate(NamedTuple):
    """Stages on meshes, a schedule of theirs, and the seconds of a step: by the simulator, and of
    the optimizer after it; if it `is_bound`, those that it takes at least, which are no less than
    the best plan's.
    """

    step_s: float
    answer: Answer
    stages: tuple[OnMesh, ...]
    family: Family
    prices: MeshPrices
    is_bound: bool = True

    @property
    def step_text(self) -> str:
        """The seconds in words."""
        return "at least " * self.is_bound + time_text(self.step_s)

    @property
    def update_s(self) -> float:
        """The seconds of the optimizer on the device that takes longest, by its bandwidth."""
        device_of = self.prices.cluster.device_of
        return max(
            own.update_bytes / device_of(place).bytes_per_s
            for own, places in zip(self.stages, self.answer.devices, strict=True)
            for place in places
        )

    @property
    def segments(self) -> list[list[OnMesh]]:
        """The segments of each stage: itself, where it is not cut further; what goes on to hosts
        of another kind takes the way there.
        """
        pairs = zip(self.answer.stages, self.stages, strict=True)
        found = [self.prices.segments(stage, own.shape) for stage, own in pairs]
        for own, (before, (*_, onto)) in zip(found, pairwise(self.answer.stages), strict=False):
            if onto.kind != before.submesh.kind:
                handover_s = self.prices.handover_s(before.end, before.submesh, onto.kind)
                own[-1] = own[-1]._replace(price=own[-1].price._replace(handover_s=handover_s))
        return found

    @property
    def schedule(self) -> Family:
        """The schedule of all segments."""
        sizes = tuple(map(len, self.segments))
        return segmented(sizes, self.family) if max(sizes) > 1 else self.family

    @property
    def policy(self) -> str:
        """The memory policy in words."""
        return str(self.prices.policy)

    @property
    def meshes(self) -> str:
        """The stages in words: layers and mesh of each where they are few."""
        shapes = [" x ".join(map(str, own.shape)) for own in self.stages]
        counts = [stage.end - stage.start for stage in self.answer.stages]
        if len(shapes) > _FEW_STAGES:
            every = (f"{count_text(n, 'stage')} on {own}" for own, n in Counter(shapes).items())
            return f"{'+'.join(map(str, counts))} layers: {', '.join(every)}"
        pairs = zip(counts, shapes, strict=True)
        return ", ".join(f"{count_text(n, 'layer')} on {shape}" for n, shape in pairs)

    def __str__(self) -> str:
        number = count_text(self.prices.num_microbatches, "micro-batch")
        return f"{self.family.name}, {number}, {self.policy}, {self.meshes}"


def bounded(answer: Answer, family: Family, prices: MeshPrices, sized: Task) -> Candidate:
    """Return a candidate with the least that its step may take."""
    stages = tuple(filter(None, (prices.on_mesh(*stage) for stage in answer.stages)))
    own = Candidate(0.0, answer, stages, family, prices)
    in_flight = most_kept(family, len(stages), prices.num_microbatches)
    least_s = max(_least_s(own, sized), _least_in_flight_s(own, in_flight))
    return own._replace(step_s=least_s + own.update_s)


def _least_s(own: Candidate, task: Task) -> float:
    """Return what a step takes at least: a stage is busy for all micro-batches, after the first
    has come to it, handed over on its way; and the last has to go back, where backwards are whole.
    """
    found = way_s = 0.0
    is_whole, is_chain = _has_whole_backwards(own.family), own.family.stages_per_rank == 1
    for stage, each, parts in zip(own.answer.stages, own.stages, own.segments, strict=True):
        seconds = float(task.prices(stage.submesh)[0, stage.start, stage.end])
        found = max(found, way_s + task.num_microbatches * seconds)
        way_s += each.forward_s + is_whole * each.backward_s
        way_s += is_chain * (1 + is_whole) / 2 * parts[-1].price.handover_s
    return found


def _least_in_flight_s(own: Candidate, in_flight: Sequence[int]) -> float:
    """Return what a step takes at least, as no more micro-batches than a stage keeps are on their
    way from it to the end and back at a time.
    """
    found = way_s = 0.0
    is_whole, is_chain = _has_whole_backwards(own.family), own.family.stages_per_rank == 1
    for each, number in zip(reversed(own.segments), reversed(in_flight), strict=True):
        way_s += sum(part.forward_s + is_whole * part.backward_s for part in each)
        way_s += is_chain * each[-1].price.handover_s
        found = max(found, own.prices.num_microbatches * way_s / number)
    return found


@lru_cache(maxsize=64)
def most_kept(family: Family, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Return how many micro-batches each stage keeps something of, at the most: as `work_of` has
    it, from few micro-batches, since a stage that keeps not all of these never keeps more.
    """
    few = min(num_microbatches, _FEW * num_stages)
    kept = (each.most_kept for each in work_of(family, num_stages, few))
    return tuple(num_microbatches if own == few else own for own in kept)


@cache
def _has_whole_backwards(family: Family) -> bool:
    return not divides_backwards(family(2 * family.stages_per_rank, 2))


def priced(own: Candidate) -> tuple[Lowering, Costs]:
    """Return what the simulator is given: how to make the schedule of the segments of all stages,
    each on the rank that stands for its mesh, and what each costs.
    """
    segments = [*chain(*own.segments)]
    count, family = len(segments), own.schedule
    ranks = family.ranks(count)
    crossing = [(n, n + 1) for n in range(count - 1) if ranks[n] != ranks[n + 1]]
    how = Lowering(
        family=family,
        ranks=ranks,
        transfers=tuple(Transfer(producer=a, consumer=b) for a, b in crossing),
        recompute=frozenset(range(count)) if own.prices.policy.recomputes else frozenset(),
    )
    one_way_s = {
        edge: segments[a].price.handover_s / 2 for a, b in crossing for edge in ((a, b), (b, a))
    }
    forward_s = tuple(segment.forward_s for segment in segments)
    costs = Costs(
        forward_s=forward_s,
        backward_s=tuple(segment.backward_s for segment in segments),
        recompute_s=forward_s,
        transfer_s=one_way_s or 0,
    )
    return how, costs


@lru_cache(maxsize=16)
def compiled_schedule(how: Lowering, num_microbatches: int) -> Compiled:
    return compiled(lower_unproved(how, num_microbatches, make=made))
