"""Find the plan that takes the least time: every candidate is predicted, or shown to be slower.

Candidates come in the order of what they take at least; one whose least is more than what another
was predicted to take needs no schedule and no simulation.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf

from penstock.costs.cluster import Cluster
from penstock.costs.profile import Profile
from penstock.errors import ConfigError
from penstock.schedules.costs import UNIT_COSTS
from penstock.schedules.critical_path import critical_path
from penstock.schedules.family import Family
from penstock.schedules.names import SCHEDULE_NAMES
from penstock.trace.timeline import Timeline
from penstock.trace.units import bytes_text, count_text

from .candidates import (
    Constraints,
    Size,
    can_run,
    families,
    is_large,
    is_long,
    sizes,
    takes_costs,
    why_no_size,
)
from .plan import Plan
from .predict import Prediction
from .search import Evaluator, Excess, soonest_s
from .together import Tuner

_MARGIN = 1.1
"""Candidates that take so many times as long as the fastest are not worth a line."""
SAME = 1.01
"""Candidates that take so many times as long as the fastest are as fast."""
_LEAST_KEPT = 5
"""However few are asked for, so that the plan that is chosen is the same."""
_TUNED, _LEAST_TUNED, _NEAR = 2, 100, 1.02
"""Of the best plans so many are tuned, with so many changes at least, where they take more than so
many times as long as any plan must."""
_WORTH_IT = 0.995
"""What is tuned has to take at most so much of the time of what has a name."""
_REFINED = 6
"""Sizes for which schedules are looked at that are made for costs: making one takes long."""


@dataclass(frozen=True)
class OnRanks:
    """A candidate whose ranks have a device each: its size, and the prediction of its step."""

    size: Size
    predicted: Prediction

    @property
    def plan(self) -> Plan:
        return self.predicted.plan

    @property
    def step_s(self) -> float:
        """Seconds of a step, optimizer included."""
        assert self.plan.predicted_step_s is not None
        return self.plan.predicted_step_s

    is_bound = False

    @property
    def num_devices(self) -> int:
        """Devices that it keeps busy; a thread of a rank has a core of its own."""
        return self.size.num_ranks * self.size.num_replicas * self.plan.threads_per_stage

    @property
    def update_s(self) -> float:
        """Seconds of the optimizer after the step."""
        return self.predicted.update_s

    @property
    def timeline(self) -> Timeline:
        """The predicted step."""
        return self.predicted.timeline

    @property
    def peak_bytes(self) -> int:
        """The most that a rank keeps."""
        return max(self.timeline.peak_bytes_of_ranks())

    @property
    def decisions(self) -> dict[str, object]:
        """What was decided, by name."""
        plan = self.plan
        return {
            "stages": (plan.partition, plan.placement.places, plan.threads_per_stage),
            "replicas": self.size.num_replicas,
            "micro-batches": plan.num_microbatches,
            "schedule": plan.schedule.name,
            "sharding": "auto",
            "recompute": frozenset(plan.recompute),
        }

    @property
    def stages_text(self) -> str:
        """The number of stages in words, with ranks and threads where these are others."""
        threads = self.plan.threads_per_stage
        ranks = f" on {self.size.num_ranks}" if self.plan.schedule.stages_per_rank > 1 else ""
        return f"{self.plan.num_stages}{ranks}" + f", {threads} threads" * (threads > 1)

    @property
    def recompute_text(self) -> str:
        """How many stages recompute."""
        return f"{len(self.plan.recomputing)} of {self.plan.num_stages}"

    def __str__(self) -> str:
        threads = self.plan.threads_per_stage
        replicas = count_text(self.size.num_replicas, "replica")
        if threads > 1:
            replicas += f" of {threads} threads"
        microbatches = count_text(self.size.num_microbatches, "micro-batch")
        return f"{count_text(self.size.num_stages, 'stage')} x {replicas}, {microbatches}"


@dataclass(frozen=True)
class Candidates:
    """The best candidates, the chosen one first and then the fastest first, and the unsplit model.

    `unsplit_model` is None where that does not fit, or is not what was asked for:
    `allows_unsplit_model` tells which.
    `num_looked_at` counts the plans that were made.
    """

    best: tuple[OnRanks, ...]
    unsplit_model: OnRanks | None
    num_looked_at: int
    allows_unsplit_model: bool = True


def find_plans(
    profiles: Sequence[Profile], cluster: Cluster, asked: Constraints, *, num_best: int = 5
) -> Candidates:
    """Predict what may be fastest of all candidates; the same input gives the same answer.

    `profiles` are of one model, each with another number of threads for a rank.  Among the best,
    each has other numbers of ranks, replicas or threads than those before it.

    Raises:
        PlanError: the profiles are of different models; names the first layer that differs.
        ConfigError: nothing fits; says by how much, and what would help.
    """
    for profile in profiles[1:]:
        profile.check_model(profiles[0].layers)
    evaluators = [Evaluator(each, cluster, asked) for each in profiles]
    search = _Search(evaluators, asked, max(num_best, _LEAST_KEPT))
    search.run()
    found = search.choices()
    tied = (each for each in found.best if each.step_s <= SAME * found.best[0].step_s)
    chosen = min(tied, key=lambda each: (each.num_devices, each.step_s))
    best = (chosen, *(each for each in found.best if each is not chosen))
    return replace(found, best=best[:num_best])


class _Search:
    """Candidates that were looked at, the fastest of each kind."""

    def __init__(self, evaluators: Sequence[Evaluator], asked: Constraints, num_best: int) -> None:
        self._evaluators, self._asked, self._num_best = evaluators, asked, num_best
        self._best: dict[tuple[int, int, int], OnRanks] = {}
        self._too_large: list[tuple[Evaluator, Size, Family, bool]] = []
        self._num_plans = 0
        self._plain: dict[tuple[int, Size], OnRanks] = {}
        self._in_order = [
            [
                size
                for size in sizes(asked, each.cluster, each.threads, len(each.profile.spans))
                if can_run(asked, size)
            ]
            for each in evaluators
        ]

    def run(self) -> None:
        """Look at every candidate that could be among the best, and at the unsplit model; then at
        the schedules that are made for costs, for the sizes that were fastest without.
        """
        has_unsplit: set[int] = set()

        def may_win(n: int, size: Size, least_s: float) -> bool:
            if is_long(size) and self._best:
                return False
            is_first_unsplit = size.num_stages == 1 and n not in has_unsplit
            return is_first_unsplit or least_s < self._limit_s()

        def is_another(n: int, size: Size, least_s: float) -> bool:
            is_known = self._kind(self._evaluators[n], size) in self._best
            return len(self._best) < self._num_best and not is_known and not is_long(size)

        for n, size in self._sizes(may_win):
            self._look_at(self._evaluators[n], size)
            fits = self._kind(self._evaluators[n], size) in self._best
            has_unsplit.update({n} if size.num_stages == 1 and fits else ())
        for n, size in self._sizes(is_another):  # to compare with
            self._look_at(self._evaluators[n], size, is_wanted=True)
        fastest = sorted(self._plain.items(), key=lambda item: (item[1].step_s, item[0]))
        for (n, size), found in fastest[:_REFINED]:
            self._refine(self._evaluators[n], size, found.predicted)
        self._tune()

    def choices(self) -> Candidates:
        """Return what was found; a ConfigError if nothing fits."""
        found = sorted(self._best.values(), key=lambda each: each.step_s)
        if not found:
            raise ConfigError(self._nothing_fits())
        unsplit = next((each for each in found if each.size.num_stages == 1), None)
        best = tuple(found[: self._num_best])
        allows_unsplit_model = any(size.num_stages == 1 for own in self._in_order for size in own)
        return Candidates(best, unsplit, self._num_plans, allows_unsplit_model)

    def _sizes(self, matters: Callable[[int, Size, float], bool]) -> Iterator[tuple[int, Size]]:
        """Yield the sizes that matter when it is their turn, each after the number of its
        evaluator, in the order of what they take at least.  A search for the best order of unlike
        devices takes long: it has its own turn, and is left out where no order matters.
        """
        waiting = [
            (is_long(size), evaluator.least_s(size, in_any_order=is_open), n, size, is_open)
            for n, evaluator in enumerate(self._evaluators)
            for size in self._in_order[n]
            for is_open in ((False, True) if evaluator.may_reorder(size) else (False,))
        ]
        heapify(waiting)
        while waiting:
            is_last, least_s, n, size, is_open = heappop(waiting)
            if not matters(n, size, least_s):
                continue
            if not is_open:
                yield n, size
            elif (anew := self._evaluators[n].reordered(size)) is not None:
                anew_s = self._evaluators[n].least_s(anew)
                heappush(waiting, (is_last, anew_s, n, anew, False))

    def _limit_s(self) -> float:
        steps_s = sorted(found.step_s for found in self._best.values())
        if len(steps_s) < self._num_best:
            return steps_s[0] * _MARGIN if steps_s else inf
        return min(steps_s[self._num_best - 1], steps_s[0] * _MARGIN)

    @staticmethod
    def _kind(evaluator: Evaluator, size: Size) -> tuple[int, int, int]:
        return size.num_ranks, size.num_replicas, evaluator.threads

    def _look_at(self, evaluator: Evaluator, size: Size, *, is_wanted: bool = False) -> None:
        """Predict one size with every schedule that is made for no costs; where only others are
        wanted, with those, made for unit costs so far.
        """
        number = self._evaluators.index(evaluator)
        wanted = list(families(self._asked, size, UNIT_COSTS))
        for family in [x for x in wanted if not takes_costs(x)] or wanted:
            predicted = self._planned(evaluator, size, family)
            if predicted is None:
                return  # the others keep no less
            may_lose = size.num_stages == 1 or is_wanted
            if not may_lose and soonest_s(predicted) >= self._limit_s():
                return  # other schedules have the same work to do
            found = self._keep(evaluator, size, predicted)
            if found is not None:
                before = self._plain.get((number, size), found)
                self._plain[number, size] = min(before, found, key=lambda each: each.step_s)

    def _refine(self, evaluator: Evaluator, size: Size, like: Prediction) -> None:
        """Try the families made for costs: a known plan's, then those of the plan they give."""
        if soonest_s(like) >= min((found.step_s for found in self._best.values()), default=inf):
            return
        for family in filter(takes_costs, families(self._asked, size, like.costs)):
            predicted = self._planned(evaluator, size, family)
            if predicted is None:
                continue
            self._keep(evaluator, size, predicted)
            if predicted.costs != like.costs:
                own = families(self._asked, size, predicted.costs)
                again = next(each for each in own if each.name == family.name)
                anew = self._planned(evaluator, size, again)
                if anew is not None:
                    self._keep(evaluator, size, anew)

    def _tune(self) -> None:
        """Look for list schedules near the best plans of a model of unlike layers."""
        if critical_path.__name__ not in (self._asked.schedules or SCHEDULE_NAMES):
            return
        best = sorted(self._best.items(), key=lambda item: item[1].step_s)[:_TUNED]
        left = max(_LEAST_TUNED, self._num_plans // 2) // len(best or (0,))
        for kind, found in best:
            evaluator = next(each for each in self._evaluators if each.threads == kind[-1])
            is_near = found.step_s <= evaluator.least_s(found.size) * _NEAR
            is_one = found.size.num_ranks == 1
            if is_one or is_near or is_large(found.size) or not evaluator.is_uneven(found.size):
                continue
            tuner = Tuner(evaluator, found.size, max(self._asked.stages_per_rank), left)
            better = tuner.run(found.predicted)
            self._num_plans += left - tuner.left
            if better is not None and better[1].quick_step_s < found.step_s * _WORTH_IT:
                self._best[kind] = _found(*better)

    def _planned(
        self, evaluator: Evaluator, size: Size, family: Family, *, with_messages: bool = False
    ) -> Prediction | None:
        self._num_plans += 1
        plan = evaluator.plan_of(size, family, with_messages=with_messages)
        if plan is None:
            self._too_large.append((evaluator, size, family, with_messages))
            return None
        return evaluator.predicted(plan)

    def _keep(self, evaluator: Evaluator, size: Size, predicted: Prediction) -> OnRanks | None:
        """Predict how long a plan takes, and keep it if it is the fastest of its kind that fits;
        one whose messages do not fit is made again, with room for them.  None if none fits.
        """
        found = _found(size, predicted)
        kind = self._kind(evaluator, size)
        fastest = self._best.get(kind)
        if fastest is not None and fastest.step_s <= found.step_s:
            return found
        if not evaluator.fits(size, predicted):
            family = predicted.plan.schedule
            again = self._planned(evaluator, size, family, with_messages=True)
            if again is None:
                return None
            found = _found(size, again)
        if fastest is None or found.step_s < fastest.step_s:
            self._best[kind] = found
        return found

    def _nearest(self) -> tuple[Excess, Size]:
        """Return what does not fit by least, and by how much: of those that may be nearest."""
        too_large = [(each[0].least_excess(each[1]), each) for each in self._too_large]
        nearest: tuple[Excess, Size] | None = None
        for least, (evaluator, size, family, with_messages) in sorted(
            too_large, key=lambda pair: pair[0]
        ):
            if nearest is not None and least > nearest[0].num_bytes:
                break
            found = evaluator.excess_of(size, family, with_messages=with_messages), size
            nearest = min(nearest or found, found, key=lambda pair: (pair[0].num_bytes, pair[1]))
        assert nearest is not None, "something is too large"
        return nearest

    def _nothing_fits(self) -> str:
        if not self._too_large:
            own = min(self._evaluators, key=lambda each: each.threads)
            spans = len(own.profile.spans)
            why = why_no_size(self._asked, own.cluster, own.threads, spans)
            return f"no plan is possible: {why}"
        excess, size = self._nearest()
        moves = any(evaluator.may_offload(size) for evaluator in self._evaluators)
        remedies = ["devices with more memory", "an optimizer that keeps less"]
        if not moves:
            remedies.insert(0, "offload (host_bytes_per_s of the devices)")
        if size.microbatch_size(self._asked.batch_size) > 1:
            remedies.insert(0, "smaller micro-batches (a larger num_microbatches)")
        return (
            f"the model fits nowhere: the nearest plan, {count_text(size.num_stages, 'stage')} on "
            f"{count_text(size.num_ranks, 'rank')} with "
            f"{count_text(size.num_microbatches, 'micro-batch')}, lacks "
            f"{bytes_text(round(excess.num_bytes))} on its fullest stage, where "
            f"{bytes_text(round(excess.limit_bytes))} may be used even with whole stages "
            f"recomputed{' and moved away' if moves else ''}. What would help: "
            f"{', '.join(remedies)}, more devices, or layers that are smaller"
        )


def _found(size: Size, predicted: Prediction) -> OnRanks:
    plan = replace(predicted.plan, predicted_step_s=predicted.quick_step_s)
    return OnRanks(size, replace(predicted, plan=plan))
