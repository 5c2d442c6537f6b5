"""Why a plan on sub-meshes is the best of those that were simulated, and what limits it."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from penstock.schedules import segmented
from penstock.schedules.family import Family
from penstock.trace.units import count_text, percent_text, time_text

from .mesh_costs import MeshPrices, OnMesh
from .plan import Plan
from .stage_rows import segments_of, stages_text
from .submeshes import Answer

_FEW_STAGES = 4
"""Up to which each is described."""
_WORTH_SAYING = 1e-3
"""The share of a step from which the optimizer is named."""


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
        """Whether stages recompute, in words."""
        return str(self.prices.way)

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


_DECISIONS: dict[str, Callable[[Candidate], object]] = {
    "stages": lambda own: own.answer.stages,
    "micro-batches": lambda own: own.prices.num_microbatches,
    "schedule": lambda own: own.family,
    "sharding": lambda own: own.prices.plan,
    "recompute": lambda own: own.policy,
}
"""What tells candidates apart, in the order in which it is decided."""


def why_on_meshes(plan: Plan, found: Sequence[Candidate], bubble: float) -> Iterator[str]:
    """Yield lines for the plan of the first candidate: its step, what limits it, and for each
    decision the fastest that decides otherwise.
    """
    best = found[0]
    where = "" if plan.cluster is None else f" on {plan.cluster.name}"
    yield (
        f"a step is predicted to take {time_text(best.step_s)}{where}, the least of "
        f"{count_text(len(found), 'candidate')}"
    )
    if idle := plan.placement.idle:
        yield f"devices {', '.join(map(str, idle))} stay unused: with them a step takes no less"
    assert plan.predicted_s is not None and plan.predicted_stages is not None
    times = {own: sum(plan.predicted_s[n] for n in own) for own in segments_of(plan)}
    slowest = max(times, key=times.__getitem__)
    handover_s = max(own.handover_s for own in plan.predicted_stages)
    yield (
        f"limited by stage {stages_text(slowest)}, {time_text(times[slowest])} a micro-batch; "
        f"bubble {percent_text(bubble)}"
        + (f", slowest handover {time_text(handover_s)}" if handover_s else "")
    )
    if best.update_s > _WORTH_SAYING * best.step_s:
        yield f"the optimizer takes {time_text(best.update_s)} of a step, where it takes longest"
    for name, decided in _DECISIONS.items():
        others = (other for other in found if decided(other) != decided(best))
        for other in list(others)[:1]:  # they are sorted
            slower = other.step_s / best.step_s - 1
            yield f"with other {name}: {other.step_text} ({slower:+.1%}): {other}"
    yield (
        "each device's bytes: weights with gradients and optimizer state, activations at most; "
        "to the next stage: of a micro-batch, and as much comes back"
    )
