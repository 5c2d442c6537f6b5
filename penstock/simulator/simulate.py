"""Predict the start and end of each instruction of a schedule, from costs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby, repeat
from operator import attrgetter

from penstock.schedules import ir
from penstock.schedules.costs import Costs, per_edge, per_stage
from penstock.schedules.passes import add_communication
from penstock.schedules.transfers import Transfers, chain_transfers
from penstock.schedules.walk import collection_paused, walk_runs
from penstock.trace.timeline import Span, Timeline

from .engine import Compiled, Edge, Engine, Pool, Way, compiled

_span = partial(tuple.__new__, Span)  # the same as Span(), without a call of Python code


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The links and cores that ranks share, and the sizes of messages."""

    way_of: Callable[[Edge], Way]
    """The way of a message along an edge between two ranks."""
    num_bytes: Mapping[Edge, int] = field(default_factory=dict)
    """The bytes of a message of each edge."""
    pools: tuple[Pool, ...] = ()
    """The ranks on the same cores."""


@collection_paused()
def simulate(
    schedule: ir.Schedule,
    costs: Costs,
    *,
    transfers: Transfers | None = None,
    sharing: Sharing | None = None,
) -> Timeline:
    """Price `schedule`: each rank runs its program in order and starts each instruction when free.

    A send takes `send_s`.  Its message arrives `transfer_s` later, and the receive then takes
    `receive_s`.  Messages within a rank take no time.  With `sharing` its ways hold instead:
    messages may wait for others on their links, and ranks may share cores.

    Sums of gradients run one after the other beside all else, each from the end of its stage's
    last backward, and wait for no link.  What is left of them when a rank has ended is a span of
    its own: they are exposed.

    A schedule without communication gets it for `transfers`, or for a chain in which every stage
    feeds the next.  The step begins at 0 seconds; exact costs (ints, Fractions) give exact times.

    Raises:
        ConfigError: `costs` lacks a stage or an edge of the schedule.
        ScheduleError: ranks would wait for each other for ever.
    """
    # Lower the schedule if it has no communication; then price and run it.
    if not any(isinstance(instruction, ir.Communication) for instruction in schedule.instructions):
        if transfers is None:
            transfers = chain_transfers(schedule.num_stages)
        schedule = add_communication(schedule, transfers)
    program = compiled(schedule)
    ends_s = _ends_s(program, costs, sharing)
    num_bytes = sharing.num_bytes if sharing is not None else {}
    spans = _spans(program.schedule, ends_s, num_bytes)
    if last_sums := _last_sums(program, costs, ends_s):
        spans = _with_exposed(spans, last_sums, ends_s)
    return Timeline(tuple(spans))


def step_s(program: Compiled, costs: Costs, sharing: Sharing | None = None) -> float:
    """Return the length of the step alone, equal to that of `simulate` to the last digit.

    Raises:
        ConfigError: `costs` lacks a stage or an edge of the schedule.
        ScheduleError: ranks would wait for each other for ever.
    """
    ends_s = _ends_s(program, costs, sharing)
    sums_s = (done_s for _, done_s in _last_sums(program, costs, ends_s))
    return max(chain((of_rank[-1] for of_rank in ends_s), sums_s))


def _ends_s(program: Compiled, costs: Costs, sharing: Sharing | None) -> list[list[float]]:
    """Return, for each rank, a 0 and the end of each instruction."""
    ranks, num_stages = program.ranks, len(program.ranks)
    seconds = _seconds(costs, num_stages)
    way_of = _ways(costs, num_stages) if sharing is None else sharing.way_of
    ways = [None if ranks[edge[1]] == ranks[edge[2]] else way_of(edge) for edge in program.edges]
    prices = [seconds[type(x)][x.stage] for x in program.prices]
    engine = Engine(program, prices, ways, () if sharing is None else sharing.pools)
    engine.run()
    if any(p < len(codes) for p, codes in zip(engine.position, program.codes, strict=True)):
        for _ in walk_runs(program.schedule):  # raises, and names the ranks that wait
            pass
    return engine.ends_s


def _last_sums(
    program: Compiled, costs: Costs, ends_s: Sequence[Sequence[float]]
) -> list[tuple[int, float]]:
    """Return, for each rank, the stage whose gradients are summed last and the end of that sum;
    nothing if no sums are priced.
    """
    reduce_s = per_stage(costs.reduce_s, len(program.ranks), "reduce_s")
    if not any(reduce_s):
        return []
    last_sums = []
    for instructions, of_rank in zip(program.schedule.programs, ends_s, strict=True):
        done_s: float = 0
        last, summing = -1, set[int]()
        for instruction, end_s in zip(instructions, of_rank[1:], strict=True):
            if isinstance(instruction, ir.ReduceGradients):
                summing.add(instruction.stage)
            elif isinstance(instruction, ir.ADDS_GRADIENTS) and instruction.stage in summing:
                last, done_s = instruction.stage, max(done_s, end_s) + reduce_s[instruction.stage]
        last_sums.append((last, done_s))
    return last_sums


def _with_exposed(
    spans: Iterable[Span],
    last_sums: Sequence[tuple[int, float]],
    ends_s: Sequence[Sequence[float]],
) -> Iterator[Span]:
    """Move the last sum of each rank that ends before its sums to where it is left over."""
    of_ranks = groupby(spans, key=attrgetter("rank"))
    for (rank, own), (stage, done_s) in zip(of_ranks, last_sums, strict=True):
        if done_s > (end_s := ends_s[rank][-1]):
            last = ir.ReduceGradients(stage)
            yield from (span for span in own if span.instruction != last)
            yield Span(rank, last, end_s, done_s)
        else:
            yield from own


def _ways(costs: Costs, num_stages: int) -> Callable[[Edge], Way]:
    """Return the function from an edge to the way of its messages, with links for each alone."""
    send_s = per_stage(costs.send_s, num_stages, "send_s")
    receive_s = per_stage(costs.receive_s, num_stages, "receive_s")
    transfer_s = per_edge(costs.transfer_s)

    def way_of(edge: Edge) -> Way:
        _, source, target = edge
        return Way(
            send_s=send_s[source],
            latency_s=transfer_s(source, target),
            receive_s=receive_s[target],
        )

    return way_of


def _spans(
    schedule: ir.Schedule, ends_s: list[list[float]], num_bytes: Mapping[Edge, int]
) -> Iterable[Span]:
    for rank, (program, of_rank) in enumerate(zip(schedule.programs, ends_s, strict=True)):
        sizes: Iterable[int] = repeat(0)
        if num_bytes:
            sends = (x.message[:3] if isinstance(x, ir.Send) else None for x in program)
            sizes = (0 if edge is None else num_bytes.get(edge, 0) for edge in sends)
        fields = zip(repeat(rank), program, of_rank, of_rank[1:], sizes)
        yield from map(_span, fields)


def _seconds(costs: Costs, num_stages: int) -> dict[type[ir.Instruction], tuple[float, ...]]:
    """Return the seconds of each kind of instruction on each stage.

    Messages take none: the ways of their edges have their times.  Sums run beside the rest.
    """
    input_s, weight_s = costs.parts(num_stages)
    nothing = (0,) * num_stages
    return {
        ir.Forward: per_stage(costs.forward_s, num_stages, "forward_s"),
        ir.Recompute: costs.again(num_stages),
        ir.Backward: per_stage(costs.backward_s, num_stages, "backward_s"),
        ir.BackwardInput: input_s,
        ir.BackwardWeight: weight_s,
        ir.UpdateWeights: per_stage(costs.update_s, num_stages, "update_s"),
        ir.Offload: per_stage(costs.offload_s, num_stages, "offload_s"),
        ir.Fetch: per_stage(costs.fetch_s, num_stages, "fetch_s"),
        ir.CommitStatistics: per_stage(costs.commit_s, num_stages, "commit_s"),
        ir.PostReceive: nothing,
        ir.ReduceGradients: nothing,
    }
