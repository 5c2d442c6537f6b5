"""Plan stages on sub-meshes together with their sharding, as Alpa does (Zheng et al. 2022).

number of micro-batches  x  memory policy
    search     stages and meshes by the formula of a pipeline's step    (submeshes.py)
    prices     integer programs for each kind of layer and shape        (prices.py)
the best few of each  x  schedules  ──►  the simulator says which is fastest
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, product, repeat
from math import inf
from operator import attrgetter
from typing import Any

from penstock.costs.cluster import Cluster
from penstock.costs.counting.graph import Graph
from penstock.errors import PlanError
from penstock.schedules import eager_1f1b, gpipe, one_f_one_b
from penstock.schedules.family import Family
from penstock.sharding.costs import Costs as LayoutCosts
from penstock.sharding.program import layers_s
from penstock.sharding.request import ShardingRequest
from penstock.sharding.search import Search
from penstock.simulator.simulate import simulate, step_s
from penstock.trace.progress import say, saying
from penstock.trace.timeline import Timeline
from penstock.trace.units import count_text
from penstock.types import Recompute, Transport

from .arguments import Model
from .mesh_candidates import Candidate, bounded, compiled_schedule, most_kept, priced
from .mesh_costs import MEMORY_POLICIES, MemoryPolicy, MeshPrices, hosts_of
from .placement import Placement
from .plan import BalancedBy, Plan
from .reasons import why_on_meshes
from .shared_cores import num_cores
from .stage_rows import PredictedStage
from .stage_table import Task
from .submeshes import Answer, find_stages, submeshes

FAMILIES = (one_f_one_b, eager_1f1b, gpipe)
SHARDINGS = ("auto", "zero1", "zero2", "expert")
"""Ready plans that are tried: weights that are gathered once a step are in none but theirs."""
_MOST_ANSWERS = 8
"""Answers of one search that are compared."""
_SEARCH_GAP = 0.001
"""Relative optimality gap of a search."""
_NEAR = 1.05
"""Answers are looked at up to this multiple of the best step, by the search's formula."""
_MARGIN = 1.5
"""Candidates that are not simulated are listed up to this multiple of the best step."""
CUT_SHORT = "the search was interrupted"
"""Beginning of the line of a plan that says so: it is the best of a part of all."""


@dataclass(frozen=True, kw_only=True)
class MeshTask:
    """A planning task: a model, the graphs of its micro-batches, and a cluster.

    `graph_of(M)` is the graph of one of M micro-batches, and `names` are its layers.
    `factors_of(M)` are the seconds of each layer over those of the roofline; () means 1.
    `shardings`, `prices` and `policies` restrict the search.  Copies of a task share `searches`,
    by number of micro-batches, sharding and factors.
    """

    model: Model
    names: Sequence[str]
    graph_of: Callable[[int], Graph]
    cluster: Cluster
    batch_size: int
    num_microbatches: int | None = None
    families: Sequence[Family] = FAMILIES
    shardings: Sequence[str] = SHARDINGS
    prices: Callable[..., MeshPrices] = MeshPrices
    policies: Sequence[MemoryPolicy] = MEMORY_POLICIES
    factors_of: Callable[[int], tuple[float, ...]] = lambda number: ()
    limit_s: float = inf
    """Seconds that a step must be below; inf: any."""
    searches: dict[object, dict[object, Search]] = field(default_factory=dict)

    @property
    def numbers(self) -> list[int]:
        """The numbers of micro-batches that are tried."""
        if self.num_microbatches is not None:
            return [self.num_microbatches]
        most = min(self.batch_size, 8 * len(self.cluster.places))
        powers = (1 << n for n in range(most.bit_length()))
        return [number for number in powers if self.batch_size % number == 0]

    @property
    def tries(self) -> list[tuple[int, str, MemoryPolicy]]:
        """Numbers of micro-batches, ready plans and memory policies to try together.

        A price of bytes is tried with the first ready plan only: the others leave little choice.
        """
        every = product(self.numbers, self.shardings, self.policies)
        return [own for own in every if own[1] == self.shardings[0] or not own[2].byte_s]


@dataclass(frozen=True)
class MeshChoice:
    """The plan that was chosen, all that were simulated, fastest first, and its predicted step:
    each rank of this stands for the mesh of a stage.
    """

    plan: Plan
    candidates: tuple[Candidate, ...]
    timeline: Timeline


def plan_on_meshes(task: MeshTask) -> Plan:
    """Return the plan that the simulator finds fastest.

    Raises:
        PlanError: nothing fits; says what is missing.
    """
    return choose_on_meshes(task).plan


def choose_on_meshes(task: MeshTask) -> MeshChoice:
    """Return the plan that the simulator finds fastest, with those that it was compared with; if
    it is interrupted (Ctrl-C), of those that it has looked at, if there are any.

    Raises:
        PlanError: nothing fits; says what is missing.
    """
    search, ended = _Search(task), ""
    every = task.tries
    try:
        for done, (number, sharding, policy) in enumerate(every, 1):
            words = f"{count_text(number, 'micro-batch')}, {sharding}, {policy}"
            with saying(f"searching for stages: {words} ({done} of {len(every)})"):
                search.look(number, sharding, policy)
    except KeyboardInterrupt:
        if not search.candidates:
            raise
        ended = f"{CUT_SHORT} in part {done} of {len(every)}"
        say(ended)
    if not search.candidates:
        raise PlanError(search.missing)
    candidates = sorted(search.candidates, key=attrgetter("step_s", "is_bound"))
    best = candidates[0]
    how, costs = priced(best)
    timeline = simulate(compiled_schedule(how, best.prices.num_microbatches).schedule, costs)
    plan = _plan(task, best)
    why = (*why_on_meshes(plan, candidates, timeline.bubble), *([ended] if ended else []))
    return MeshChoice(replace(plan, why=why), tuple(candidates), timeline)


class _Search:
    """The candidates so far, and `missing`, which says why the last search found none."""

    def __init__(self, task: MeshTask) -> None:
        self.task = task
        self.candidates: list[Candidate] = []
        self.missing = "the activation memory of the schedules does not fit"

    @property
    def best_s(self) -> float:
        """Seconds that a step must be below."""
        return min((own.step_s for own in self.candidates), default=self.task.limit_s)

    def look(self, number: int, sharding: str, policy: MemoryPolicy) -> None:
        """Add the candidates of so many micro-batches, a ready plan and a memory policy."""
        task = self.task
        factors = task.factors_of(number)
        if self._even_s(number, factors) >= self.best_s:
            return
        shared = task.searches.setdefault((number, sharding, factors), {})
        how = (task.cluster, number, sharding, policy, shared, factors)
        prices = task.prices(task.graph_of(number), task.names, task.model.spans, *how)
        of_stages = cache(partial(prices.of_stages, is_1f1b=tuple(task.families) != (gpipe,)))
        sized = Task(len(task.names), hosts_of(task.cluster), of_stages, number)
        try:
            with _executor() as executor:
                prices.begin(submeshes(sized.hosts), executor)
                answers = self._answers(sized)
        except PlanError as error:
            self.missing = str(error)
            return
        self._compare(answers, prices, sized)

    def _even_s(self, number: int, factors: tuple[float, ...]) -> float:
        """Return the seconds of a step that all devices share evenly, without messages; 0 where
        devices differ.
        """
        places = self.task.cluster.places
        if len({place.kind for place in places}) > 1:
            return 0.0
        graph, count = self.task.graph_of(number), len(self.task.names)
        seconds = layers_s(graph, count, LayoutCosts((1,), self.task.cluster))
        total_s = sum(s * f for s, f in zip(seconds, factors or repeat(1.0), strict=False))
        return number * total_s / len(places)

    def _answers(self, sized: Task) -> list[Answer]:
        """Return the best answers for 1F1B, and where memory allows it for eager 1F1B, and for
        GPipe, which is ahead by all micro-batches.
        """
        options: dict[str, Any] = {"most": _MOST_ANSWERS, "eps": _SEARCH_GAP}
        options["limit_s"] = _NEAR * self.best_s
        answers = find_stages(sized, ahead=1, **options)
        for ahead in {2, sized.num_microbatches} - {1}:
            with suppress(PlanError):
                answers += find_stages(sized, ahead=ahead, **options)
        in_order = sorted(answers, key=attrgetter("seconds", "devices"))
        return [*{answer.stages: answer for answer in in_order}.values()]

    def _compare(self, answers: Sequence[Answer], prices: MeshPrices, sized: Task) -> None:
        """Simulate every answer with every schedule whose lower bound beats the best step; keep
        the others with the bound alone, where they are near.
        """
        task, candidates = self.task, self.candidates
        memory = [host.memory_bytes for host in hosts_of(task.cluster)]
        every = [bounded(*both, prices, sized) for both in product(answers, task.families)]
        for own in sorted(every, key=attrgetter("step_s")):  # the fastest shorten the rest
            if own.step_s >= self.best_s:
                is_near = candidates and own.step_s <= _MARGIN * self.best_s
                candidates.extend([own] if is_near else [])
                continue
            in_flight = most_kept(own.family, len(own.stages), prices.num_microbatches)
            kept = (
                each.price.stay_bytes + number * each.price.microbatch_bytes
                for each, number in zip(own.stages, in_flight, strict=True)
            )
            rooms = (memory[submesh.kind] for *_, submesh in own.answer.stages)
            if all(each <= room for each, room in zip(kept, rooms, strict=True)):
                how, costs = priced(own)
                program = compiled_schedule(how, prices.num_microbatches)
                seconds = step_s(program, costs) + own.update_s
                if seconds < task.limit_s:
                    candidates.append(own._replace(step_s=seconds, is_bound=False))


@contextmanager
def _executor() -> Iterator[Executor]:
    """Yield an executor whose work ends with the block, if this fails unfinished."""
    with ThreadPoolExecutor(num_cores()) as executor:
        try:
            yield executor
        except BaseException:
            executor.shutdown(cancel_futures=True)
            raise


def _plan(task: MeshTask, best: Candidate) -> Plan:
    prices, sizes = best.prices, [*map(len, best.segments)]

    def spread(of_stages: Sequence[Any]) -> tuple[Any, ...]:
        """Return for each segment what its stage has."""
        return tuple(chain(*map(repeat, of_stages, sizes)))

    devices = best.answer.devices
    kinds = [task.cluster.device_of(own[0]).torch_type for own in devices]
    recompute = Recompute.STAGE if prices.policy.recomputes else Recompute.NEVER
    wanted: str | ShardingRequest | None = prices.plan
    if prices.policy.byte_s:
        least = min(host.memory_bytes for host in hosts_of(task.cluster))
        wanted = ShardingRequest(prices.plan, memory_limit_bytes=int(least))
    is_alone = len(task.cluster.places) == 1
    places = None if devices == tuple(sorted(devices)) else spread(range(len(devices)))
    idle = {*range(len(task.cluster.places))} - {*chain(*devices)}
    return Plan(
        layers=tuple(task.model.layers),
        partition=tuple(own.num_layers for own in chain(*best.segments)),
        schedule=best.schedule,
        num_microbatches=prices.num_microbatches,
        recompute=(recompute,) * sum(sizes),
        placement=Placement(
            spread([(own,) for own in devices]),
            spread(kinds),
            shard_shapes=spread([own.shape for own in best.stages]),
            stage_places=places,
            idle=tuple(sorted(idle)),
        ),
        sharding=wanted if max(map(len, devices)) > 1 else None,
        transport=Transport.THREADS if is_alone else Transport.TORCH_DISTRIBUTED,
        balanced_by=BalancedBy.TIME,
        predicted_s=tuple(own.price.seconds for own in chain(*best.segments)),
        predicted_step_s=best.step_s,
        batch_size=task.batch_size,
        cluster=task.cluster,
        predicted_stages=tuple(_predicted(best)),
        layer_factors=prices.factors,
    )


def _predicted(best: Candidate) -> Iterator[PredictedStage]:
    """Yield what was predicted of each segment; the largest graph of a stage is that of one."""
    count, prices = len(best.stages), best.prices
    in_flight = most_kept(best.family, count, prices.num_microbatches)
    for stage, segments, number in zip(best.answer.stages, best.segments, in_flight, strict=True):
        largest = max(segments, key=attrgetter("graph_bytes"))
        for own in segments:
            is_last, price = own is segments[-1], own.price
            kept = number * price.microbatch_bytes
            kept += own.graph_bytes if prices.policy.recomputes and own is largest else 0
            sent = prices.entering_bytes(stage.end) if is_last else 0
            yield PredictedStage(
                own.forward_s,
                own.backward_s,
                price.handover_s if is_last else 0.0,
                *(round(size) for size in (own.state_bytes, kept, sent)),
            )
