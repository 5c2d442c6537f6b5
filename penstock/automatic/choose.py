"""Plan stages on sub-meshes together with their sharding, as Alpa does (Zheng et al. 2022).

number of micro-batches  x  way to keep less
    search     stages and meshes by the formula of a pipeline's step    (submeshes.py)
    prices     integer programs for each kind of layer and shape        (prices.py)
the best few of each  x  schedules  ──►  the simulator says which is fastest
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product, repeat
from operator import attrgetter, itemgetter
from typing import Any

from penstock.costs.cluster import Cluster
from penstock.costs.graph import Graph
from penstock.errors import PlanError
from penstock.planner.arguments import Model
from penstock.planner.packing import Stage, Submesh
from penstock.planner.placement import Placement
from penstock.planner.plan import BalancedBy, Plan
from penstock.planner.stage_rows import PredictedStage
from penstock.planner.stage_table import Price, Task
from penstock.planner.stage_work import made, work_of
from penstock.planner.submeshes import Answer, find_stages
from penstock.planner.wanted import Wanted
from penstock.schedules import eager_1f1b, gpipe, one_f_one_b
from penstock.schedules.costs import Costs
from penstock.schedules.family import Family
from penstock.schedules.ir import Schedule
from penstock.schedules.lower import Lowering, lower_unproved
from penstock.schedules.transfers import Transfer
from penstock.simulator.engine import compiled
from penstock.simulator.simulate import simulate, step_s
from penstock.trace.timeline import Timeline
from penstock.types import Recompute, Transport

from .prices import WAYS, MeshPrices, Way, hosts_of
from .remembered import RememberedSearch
from .why import Candidate, why_on_meshes

FAMILIES = (one_f_one_b, eager_1f1b, gpipe)
_MOST, _MARGIN = 4, 1.5
"""How many answers of each search are simulated, and how much worse by the formula they may be."""


@dataclass(frozen=True, kw_only=True)
class MeshTask:
    """What is to be planned: a model, the graphs of its micro-batches, and what it is to run on.

    `graph_of(M)` is the graph of one of M micro-batches; `names` are those of layers in it.
    `prices` and `ways` restrict what is tried; copies with another restriction have `searches`,
    by number of micro-batches and sharding, together.
    """

    model: Model
    names: Sequence[str]
    graph_of: Callable[[int], Graph]
    cluster: Cluster
    batch_size: int
    num_microbatches: int | None = None
    families: Sequence[Family] = FAMILIES
    sharding: str = "auto"
    prices: Callable[..., MeshPrices] = MeshPrices
    ways: Sequence[Way] = WAYS
    searches: dict[tuple[int, str], dict[object, RememberedSearch]] = field(default_factory=dict)

    @property
    def numbers(self) -> list[int]:
        """The numbers of micro-batches that are tried."""
        if self.num_microbatches is not None:
            return [self.num_microbatches]
        most = min(self.batch_size, 8 * len(self.cluster.places))
        powers = (1 << n for n in range(most.bit_length()))
        return [number for number in powers if self.batch_size % number == 0]


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
    """Return the plan that the simulator finds fastest, with those that it was compared with.

    Raises:
        PlanError: nothing fits; says what is missing.
    """
    found: list[Candidate] = []
    lacks, only_gpipe = "", tuple(task.families) == (gpipe,)
    for number in task.numbers:
        graph = task.graph_of(number)
        shared = task.searches.setdefault((number, task.sharding), {})
        how = (task.cluster, number, task.sharding)
        for way in task.ways:
            prices = task.prices(graph, task.names, task.model.spans, *how, way, shared)
            price = prices.price if only_gpipe else partial(price_1f1b, prices)
            sized = Task(len(task.names), hosts_of(task.cluster), price, number)
            try:
                answers = find_stages(sized, most=_MOST, uses_all_in_order=True)
            except PlanError as error:
                lacks = str(error)
                continue
            found += _candidates(task, answers, prices)
    if not found:
        raise PlanError(lacks or "what schedules keep in flight does not fit")
    found.sort(key=itemgetter(0))
    best = found[0]
    timeline = simulate(*_scheduled(best))
    plan = _plan(task, best)
    why = tuple(why_on_meshes(plan, found, timeline.bubble))
    return MeshChoice(replace(plan, why=why), tuple(found), timeline)


def price_1f1b(prices: MeshPrices, start: int, end: int, submesh: Submesh) -> Price | None:
    """Return the price of a stage as 1F1B has it: the last one's backwards follow its forwards at
    once, so its last segment recomputes nothing.
    """
    own = prices.on_mesh(start, end, submesh)
    if own is None or end < len(prices.names) or not prices.way.recomputes:
        return own and own.price
    last = prices.segments(Stage(start, end, submesh), own.shape)[-1]
    return own.price._replace(seconds=own.price.seconds - last.forward_s)


def _candidates(
    task: MeshTask, answers: Sequence[Answer], prices: MeshPrices
) -> Iterator[Candidate]:
    """Simulate schedules of the best answers."""
    memory = [host.memory_bytes for host in hosts_of(task.cluster)]
    for answer, family in product(answers, task.families):
        if answer.seconds > _MARGIN * answers[0].seconds:
            continue
        stages = tuple(filter(None, (prices.on_mesh(*stage) for stage in answer.stages)))
        every = range(len(stages)) if prices.way.recomputes else ()
        work = work_of(family, len(stages), prices.num_microbatches, frozenset(every))
        kept = (
            own.price.stay_bytes + each.most_kept * own.price.microbatch_bytes
            for own, each in zip(stages, work, strict=True)
        )
        rooms = (memory[submesh.kind] for *_, submesh in answer.stages)
        if all(own <= room for own, room in zip(kept, rooms, strict=True)):
            own = Candidate(0.0, answer, stages, family, prices)
            schedule, costs = _scheduled(own)
            yield own._replace(step_s=step_s(compiled(schedule), costs))


def _scheduled(own: Candidate) -> tuple[Schedule, Costs]:
    """Return what the simulator is given: a schedule of the segments of all stages, each on the
    rank that stands for its mesh, and what each costs.
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
    return lower_unproved(how, own.prices.num_microbatches, make=made), costs


def _plan(task: MeshTask, best: Candidate) -> Plan:
    prices, sizes = best.prices, [*map(len, best.segments)]

    def spread(of_stages: Sequence[Any]) -> tuple[Any, ...]:
        """Return for each segment what its stage has."""
        return tuple(chain(*map(repeat, of_stages, sizes)))

    devices = best.answer.devices
    kinds = [task.cluster.device_of(own[0]).torch_type for own in devices]
    recompute = Recompute.STAGE if prices.way.recomputes else Recompute.NEVER
    wanted: str | Wanted | None = task.sharding
    if prices.way.byte_s:
        least = min(host.memory_bytes for host in hosts_of(task.cluster))
        wanted = Wanted(task.sharding, memory_limit_bytes=int(least))
    is_alone = len(task.cluster.places) == 1
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
        ),
        sharding=wanted if max(map(len, devices)) > 1 else None,
        transport=Transport.THREADS if is_alone else Transport.TORCH_DISTRIBUTED,
        balanced_by=BalancedBy.TIME,
        predicted_s=tuple(own.price.seconds for own in chain(*best.segments)),
        predicted_step_s=best.step_s,
        batch_size=task.batch_size,
        cluster=task.cluster,
        predicted_stages=tuple(_predicted(best)),
    )


def _predicted(best: Candidate) -> Iterator[PredictedStage]:
    """Yield what was predicted of each segment; the largest graph of a stage is that of one."""
    count, prices = len(best.stages), best.prices
    every = frozenset(range(count) if prices.way.recomputes else ())
    work = work_of(best.family, count, prices.num_microbatches, every)
    for stage, segments, each in zip(best.answer.stages, best.segments, work, strict=True):
        largest = max(segments, key=attrgetter("graph_bytes"))
        for own in segments:
            is_last, price = own is segments[-1], own.price
            kept = each.most_kept * price.microbatch_bytes
            kept += own.graph_bytes if every and own is largest else 0
            sent = prices.entering_bytes(stage.end) if is_last else 0
            yield PredictedStage(
                own.forward_s,
                own.backward_s,
                price.handover_s if is_last else 0.0,
                *(round(number) for number in (own.state_bytes, kept, sent)),
            )
