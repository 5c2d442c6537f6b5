"""Plan stages on sub-meshes together with their sharding, as Alpa does (Zheng et al. 2022).

number of micro-batches  x  way to keep less
    search     stages and meshes by the formula of a pipeline's step    (submeshes.py)
    prices     integer programs for each kind of layer and shape        (prices.py)
the best few of each  x  schedules  ──►  the simulator says which is fastest
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from itertools import chain, product, repeat
from math import inf
from operator import attrgetter
from typing import Any

from penstock.costs.cluster import Cluster
from penstock.costs.counting.graph import Graph
from penstock.errors import PlanError
from penstock.schedules import eager_1f1b, gpipe, one_f_one_b
from penstock.schedules.costs import Costs
from penstock.schedules.family import Family
from penstock.schedules.lower import Lowering, lower_unproved
from penstock.schedules.transfers import Transfer
from penstock.sharding.request import ShardingRequest
from penstock.sharding.search import Search
from penstock.simulator.engine import Compiled, compiled
from penstock.simulator.simulate import simulate, step_s
from penstock.trace.progress import say, saying
from penstock.trace.timeline import Timeline
from penstock.trace.units import count_text
from penstock.types import Recompute, Transport

from .arguments import Model
from .mesh_candidates import Candidate, why_on_meshes
from .mesh_costs import MEMORY_POLICIES, MemoryPolicy, MeshPrices, hosts_of
from .placement import Placement
from .plan import BalancedBy, Plan
from .shared_cores import num_cores
from .stage_rows import PredictedStage
from .stage_table import Task
from .stage_work import made, work_of
from .submeshes import Answer, find_stages, submeshes
from .unsplit import divides_backwards

FAMILIES = (one_f_one_b, eager_1f1b, gpipe)
SHARDINGS = ("auto", "zero1", "zero2", "expert")
"""Ready plans that are tried: weights that are gathered once a step are in none but theirs."""
_MOST, _EPS, _NEAR, _MARGIN = 8, 0.001, 1.05, 1.5
"""How many answers of each search are compared, and the share that it may miss; how many times as
long as the best step they may take by the formula, and at least, to be shown.
"""
_FEW = 4
"""Micro-batches for each stage with which no stage is still to keep more, but of those that keep
all.
"""
CUT_SHORT = "the search was interrupted"
"""Beginning of the line of a plan that says so: it is the best of a part of all."""


@dataclass(frozen=True, kw_only=True)
class MeshTask:
    """What is to be planned: a model, the graphs of its micro-batches, and what it is to run on.

    `graph_of(M)` is the graph of one of M micro-batches; `names` are those of layers in it, and
    `factors_of(M)` the measured seconds of each by those of the roofline; () is as estimated.
    `shardings`, `prices` and `ways` restrict what is tried; copies with another restriction have
    `searches`, by number of micro-batches, sharding and factors, together.
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
    ways: Sequence[MemoryPolicy] = MEMORY_POLICIES
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
        """The numbers of micro-batches, ready plans and ways that are tried together: a price of
        bytes with the first of the plans only, since the others leave little to choose.
        """
        every = product(self.numbers, self.shardings, self.ways)
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
    found: list[Candidate] = []
    lacks, ended = ["what schedules keep in flight does not fit"], ""
    every = task.tries
    try:
        for done, (number, sharding, way) in enumerate(every, 1):
            words = f"{count_text(number, 'micro-batch')}, {sharding}, {way}"
            with saying(f"searching for stages: {words} ({done} of {len(every)})"):
                _look(task, number, sharding, way, found, lacks)
    except KeyboardInterrupt:
        if not found:
            raise
        ended = f"{CUT_SHORT} in part {done} of {len(every)}"
        say(ended)
    if not found:
        raise PlanError(lacks[-1])
    found.sort(key=attrgetter("step_s", "is_bound"))
    best = found[0]
    how, costs = _priced(best)
    timeline = simulate(_compiled(how, best.prices.num_microbatches).schedule, costs)
    plan = _plan(task, best)
    why = (*why_on_meshes(plan, found, timeline.bubble), *([ended] if ended else []))
    return MeshChoice(replace(plan, why=why), tuple(found), timeline)


def _look(
    task: MeshTask,
    number: int,
    sharding: str,
    way: MemoryPolicy,
    found: list[Candidate],
    lacks: list[str],
) -> None:
    """Add the candidates of so many micro-batches, a ready plan and a way to keep less to those
    that are found, or what is missing.
    """
    factors = task.factors_of(number)
    shared = task.searches.setdefault((number, sharding, factors), {})
    how = (task.cluster, number, sharding, way, shared, factors)
    prices = task.prices(task.graph_of(number), task.names, task.model.spans, *how)
    of_stages = cache(partial(prices.of_stages, is_1f1b=tuple(task.families) != (gpipe,)))
    sized = Task(len(task.names), hosts_of(task.cluster), of_stages, number)
    best_s = min((own.step_s for own in found), default=task.limit_s)
    try:
        with _executor() as executor:
            prices.begin(submeshes(sized.hosts), executor)
            answers = _answers(sized, _NEAR * best_s)
    except PlanError as error:
        lacks.append(str(error))
        return
    _compare(task, answers, prices, sized, found)


@contextmanager
def _executor() -> Iterator[Executor]:
    """Yield an executor whose work ends with the block, if this fails unfinished."""
    with ThreadPoolExecutor(num_cores()) as executor:
        try:
            yield executor
        except BaseException:
            executor.shutdown(cancel_futures=True)
            raise


def _answers(sized: Task, limit_s: float) -> list[Answer]:
    """Return the best answers for 1F1B, and where memory allows it for eager 1F1B, and for GPipe,
    which is ahead by all micro-batches.
    """
    find = partial(find_stages, sized, most=_MOST, eps=_EPS, limit_s=limit_s, host_by_host=True)
    found = find(ahead=1)
    for ahead in {2, sized.num_microbatches} - {1}:
        with suppress(PlanError):
            found += find(ahead=ahead)
    every = {own.stages: own for own in sorted(found, key=attrgetter("seconds", "devices"))}
    return [*every.values()]


def _compare(
    task: MeshTask,
    answers: Sequence[Answer],
    prices: MeshPrices,
    sized: Task,
    found: list[Candidate],
) -> None:
    """Add schedules of the best answers to the candidates: simulated, but for those that cannot be
    faster than the best so far, which have the least that they may take.
    """
    memory = [host.memory_bytes for host in hosts_of(task.cluster)]
    every = [_bounded(*both, prices, sized) for both in product(answers, task.families)]
    for own in sorted(every, key=attrgetter("step_s")):  # what may be fastest shortens the rest
        best_s = min((other.step_s for other in found), default=task.limit_s)
        if own.step_s >= best_s:
            found.extend([own] if found and own.step_s <= _MARGIN * best_s else [])
            continue
        in_flight = most_kept(own.family, len(own.stages), prices.num_microbatches)
        kept = (
            each.price.stay_bytes + number * each.price.microbatch_bytes
            for each, number in zip(own.stages, in_flight, strict=True)
        )
        rooms = (memory[submesh.kind] for *_, submesh in own.answer.stages)
        if all(each <= room for each, room in zip(kept, rooms, strict=True)):
            how, costs = _priced(own)
            seconds = step_s(_compiled(how, prices.num_microbatches), costs) + own.update_s
            if seconds < task.limit_s:
                found.append(own._replace(step_s=seconds, is_bound=False))


def _bounded(answer: Answer, family: Family, prices: MeshPrices, sized: Task) -> Candidate:
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


def _priced(own: Candidate) -> tuple[Lowering, Costs]:
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
        recompute=frozenset(range(count)) if own.prices.way.recomputes else frozenset(),
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
def _compiled(how: Lowering, num_microbatches: int) -> Compiled:
    return compiled(lower_unproved(how, num_microbatches, make=made))


def _plan(task: MeshTask, best: Candidate) -> Plan:
    prices, sizes = best.prices, [*map(len, best.segments)]

    def spread(of_stages: Sequence[Any]) -> tuple[Any, ...]:
        """Return for each segment what its stage has."""
        return tuple(chain(*map(repeat, of_stages, sizes)))

    devices = best.answer.devices
    kinds = [task.cluster.device_of(own[0]).torch_type for own in devices]
    recompute = Recompute.STAGE if prices.way.recomputes else Recompute.NEVER
    wanted: str | ShardingRequest | None = prices.plan
    if prices.way.byte_s:
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
            kept += own.graph_bytes if prices.way.recomputes and own is largest else 0
            sent = prices.entering_bytes(stage.end) if is_last else 0
            yield PredictedStage(
                own.forward_s,
                own.backward_s,
                price.handover_s if is_last else 0.0,
                *(round(size) for size in (own.state_bytes, kept, sent)),
            )
