"""Plans of one model: of the whole search, of baselines, and with other costs of handing over."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from time import perf_counter
from typing import Any, ParamSpec, TypeVar

from penstock.errors import PlanError
from penstock.planner import mesh_plans
from penstock.planner.make_plan import Choice, choose_on_meshes
from penstock.planner.mesh_candidates import OnMeshes
from penstock.planner.mesh_costs import MeshPrices
from penstock.planner.mesh_plans import CUT_SHORT
from penstock.planner.mesh_task import MeshTask
from penstock.planner.plan import Plan
from penstock.planner.submeshes import Submesh
from penstock.sharding.search import Search

from .baselines import BASELINES, RestrictedPrices, plan_baseline, step_s
from .subjects import Subject

_P = ParamSpec("_P")
_T = TypeVar("_T")
AUTO = "auto"
WHOLE, SIGNAL = "whole tensors", "one byte"
HANDOVERS = (WHOLE, SIGNAL)
"""Of Alpa's ablation, section 8.5: each device of the next stage is sent all, and the least that
there is.
"""
_TIMES = (1, 2, 4, 8)
"""Times as many micro-batches as Alpa has: the first with which a plan fits."""


@dataclass(frozen=True)
class HandedOver(RestrictedPrices):
    """Prices of the stages of one plan, with other costs of handing over; `next_devices` says how
    many devices have the stage that begins at a layer.
    """

    handover: str = SIGNAL
    next_devices: Mapping[int, int] = field(default_factory=dict)

    def handover_s(
        self, end: int, submesh: Submesh, kind: int, onto: tuple[int, ...] = ()
    ) -> float:
        """Return the seconds of what goes on to the next stage and comes back."""
        if end not in self.next_devices:  # the last, or inside a stage
            return super().handover_s(end, submesh, kind, onto)
        latency_s, bytes_per_s, _ = self._way_out(submesh, kind, onto)
        num_bytes = 2.0
        if self.handover == WHOLE:  # a copy for each receiver: of the next stage, of this one
            copies = self.next_devices[end] + submesh.size
            num_bytes = self.entering_bytes(end) * copies
        return 2 * latency_s + num_bytes / bytes_per_s


@dataclass
class Planned:
    """The plans of one model on a cluster, and the seconds that those of auto took."""

    subject: Subject
    cluster: str
    search_s: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))
    """By part of the search; a part may contain others."""

    @cached_property
    def task(self) -> MeshTask:
        """What is planned."""
        return self.subject.task(self.cluster)

    def auto(self, number: int) -> Choice:
        """Return the plan of the whole search with what it was chosen from."""
        with (
            clocked(self.search_s, "begin", MeshPrices, "begin"),
            clocked(self.search_s, "ranges", Search, "of_ranges"),
            clocked(self.search_s, "stages", mesh_plans, "find_stages"),
        ):
            graph_of = timed(self.search_s, "graph", self.task.graph_of)
            task = replace(self.task, num_microbatches=number, graph_of=graph_of)
            return _whole(timed(self.search_s, "all", choose_on_meshes)(task))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of auto by part, and of all."""
        found = self.search_s
        return {
            "graph_s": found["graph"],
            "programs_s": found["begin"] + found["ranges"],
            "stages_s": found["stages"] - found["ranges"],
            "simulation_s": found["all"] - found["graph"] - found["begin"] - found["stages"],
            "search_s": found["all"],
        }

    def first_that_fits(self, make: Callable[[int], _T]) -> _T | None:
        """Return a plan with as many micro-batches as Alpa has, or else with more."""
        for times in _TIMES:
            number = self.subject.num_microbatches * times
            if self.task.batch_size % number == 0:
                with suppress(PlanError):
                    return make(number)
        return None

    def all(self) -> tuple[Choice | None, dict[str, Plan]]:
        """Return the choice of auto, and the plan of each baseline that something fits for.

        Auto tries the number of micro-batches of a faster baseline, too, and they that of auto.
        """
        best = self.first_that_fits(self.auto)
        found = {name: self.first_that_fits(partial(self._baseline, name)) for name in BASELINES}
        plans = {name: plan for name, plan in found.items() if plan is not None}
        if best is None:
            return None, plans
        tried = {best.plan.num_microbatches}
        for plan in sorted(plans.values(), key=step_s):
            if step_s(plan) < step_s(best.plan) and plan.num_microbatches not in tried:
                tried.add(plan.num_microbatches)
                best = min(best, self.auto(plan.num_microbatches), key=_step_of)
        for name, plan in plans.items():
            if plan.num_microbatches != (number := best.plan.num_microbatches):
                with suppress(PlanError):
                    plans[name] = min(plan, self._baseline(name, number), key=step_s)
        return best, plans

    def _baseline(self, name: str, number: int) -> Plan:
        return plan_baseline(name, replace(self.task, num_microbatches=number))

    def handed_over(self, choice: Choice, handover: str) -> Plan:
        """Return the same plan, simulated with another cost of handing over."""
        best = choice.candidates[0]
        assert isinstance(best, OnMeshes)
        stages = {(own.start, own.end, own.submesh) for own in best.answer.stages}
        sizes = {own.start: own.submesh.size for own in best.answer.stages}
        only: dict[str, Any] = {"allow": lambda *stage: stage in stages, "next_devices": sizes}
        prices = partial(HandedOver, handover=handover, **only)
        alone: dict[str, Any] = {"families": (best.family,), "policies": best.prices.policies}
        number = choice.plan.num_microbatches
        task = replace(self.task, prices=prices, num_microbatches=number, **alone)
        return choose_on_meshes(task).plan

    def tflops(self, plan: Plan) -> float:
        """Return TFLOPS per device."""
        number = plan.num_microbatches
        flops = self.subject.flops(self.task.graph_of(number), number)
        return flops / step_s(plan) / self.subject.num_devices / 1e12


def _whole(choice: Choice) -> Choice:
    """Pass an interrupt on, which a search ends at with the best so far."""
    if any(line.startswith(CUT_SHORT) for line in choice.plan.why):
        raise KeyboardInterrupt
    return choice


def _step_of(choice: Choice) -> float:
    return step_s(choice.plan)


def timed(
    seconds: defaultdict[str, float], part: str, function: Callable[_P, _T]
) -> Callable[_P, _T]:
    """Return a function that adds its seconds to a part."""

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        begin_s = perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[part] += perf_counter() - begin_s

    return call


@contextmanager
def clocked(seconds: defaultdict[str, float], part: str, owner: Any, name: str) -> Iterator[None]:
    """Count the seconds of a function of a module or class meanwhile."""
    function = getattr(owner, name)
    setattr(owner, name, timed(seconds, part, function))
    try:
        yield
    finally:
        setattr(owner, name, function)
