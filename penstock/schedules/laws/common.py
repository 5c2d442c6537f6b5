"""The laws of every schedule, and of limits of memory: each raises at the first fault."""

from collections import Counter, defaultdict
from dataclasses import dataclass

from penstock.errors import ScheduleError
from penstock.schedules import ir
from penstock.schedules.costs import one_each
from penstock.schedules.memory import BytesPerRank, Sizes, live_bytes
from penstock.schedules.walk import walk_runs

from .lanes import Lanes, Places, first_too_early

_NOTHING_KEPT = "there is nothing to move away: its Forward has not run, or its backward has"
_TWICE = "it is moved away twice"
_NOT_AWAY = "there is nothing to bring back: no Offload of it stands before"
_STAYS_AWAY = "what it needs was moved away and no Fetch has brought it back"


def offloads(lanes: Lanes) -> None:
    """Check that an Offload follows its Forward, and that one Fetch precedes the first use."""
    for stage in range(lanes.num_stages):
        fetches = list(lanes.each(stage, ir.Fetch))
        offloaded = list(lanes.each(stage, ir.Offload))
        if fetches or offloaded:
            _check_offloads(lanes, stage, offloaded, fetches)


def _check_offloads(
    lanes: Lanes,
    stage: int,
    offloaded: list[tuple[int, ir.Offload]],
    fetches: list[tuple[int, ir.Fetch]],
) -> None:
    forwards = lanes.computes(stage, ir.Forward)
    needs = {
        **lanes.computes(stage, *ir.GIVES_GRADIENTS),
        **lanes.computes(stage, ir.Recompute),  # before the backward: `recomputes` holds
    }
    # an Offload between its Forward and the first use
    away: dict[int, int] = {}
    for position, x in offloaded:
        i = x.microbatch
        if i in away:
            raise lanes.fault(stage, position, _TWICE)
        if not forwards.get(i, position) < position < needs.get(i, position):
            raise lanes.fault(stage, position, _NOTHING_KEPT)
        away[i] = position
    # a Fetch after its Offload
    back: dict[int, int] = {}
    for position, y in fetches:
        i = y.microbatch
        if i in back or away.get(i, position) >= position:
            raise lanes.fault(stage, position, _NOT_AWAY)
        back[i] = position
    # and before the first use
    for i in away:
        if back.get(i, needs[i]) >= needs[i]:
            raise lanes.fault(stage, needs[i], _STAYS_AWAY)


def operands(lanes: Lanes) -> None:
    """Check that values are received before they are used, and computed before they are sent."""
    for stage in range(lanes.num_stages):
        forwards = lanes.computes(stage, ir.Forward)
        backwards = lanes.computes(stage, *ir.GIVES_GRADIENTS)
        weights = lanes.computes(stage, ir.BackwardWeight)
        _check_operands(lanes, stage, backwards, forwards, "its Forward has not run")
        _check_operands(lanes, stage, weights, backwards, "its BackwardInput has not run")
        for peer in lanes.producers.get(stage, ()):
            _check_received(lanes, ir.ReceiveActivation, stage, peer, forwards)
            _check_computed(lanes, ir.SendGradient, stage, peer, backwards)
        for peer in lanes.consumers.get(stage, ()):
            _check_received(lanes, ir.ReceiveGradient, stage, peer, backwards)
            _check_computed(lanes, ir.SendActivation, stage, peer, forwards)


def _check_operands(lanes: Lanes, stage: int, uses: Places, needed: Places, problem: str) -> None:
    i = first_too_early(uses, needed)
    if i is not None:
        raise lanes.fault(stage, uses[i], problem)


def _check_received(
    lanes: Lanes, kind: type[ir.Receive], stage: int, peer: int, uses: Places
) -> None:
    i = first_too_early(uses, lanes.messages(kind, stage, peer))
    if i is not None:
        raise lanes.fault(stage, uses[i], f"{kind(stage, i, peer)} must come before it")


def _check_computed(
    lanes: Lanes, kind: type[ir.Send], stage: int, peer: int, computed: Places
) -> None:
    name = "Backward" if kind.gradient else "Forward"
    sent = lanes.messages(kind, stage, peer)
    _check_operands(lanes, stage, sent, computed, f"its {name} must come before it")


def commits(lanes: Lanes) -> None:
    """Check that statistics are committed at most once, after the last Forward."""
    for stage in range(lanes.num_stages):
        commits = lanes.positions(stage, ir.CommitStatistics)
        forwards = lanes.positions(stage, ir.Forward)
        if len(commits) > 1:
            raise lanes.fault(stage, commits[1], "its statistics are committed twice")
        if commits and forwards and forwards[-1] > commits[0]:
            late = next(position for position in forwards if position > commits[0])
            why = "a forward runs after the statistics of its stage were committed"
            raise lanes.fault(stage, late, why)


def reductions(lanes: Lanes) -> None:
    """Check that gradients are added up over replicas at most once, in the last backward."""
    for stage in range(lanes.num_stages):
        begins = lanes.positions(stage, ir.ReduceGradients)
        if len(begins) > 1:
            raise lanes.fault(stage, begins[1], "its gradients are added up twice")
        if begins:
            after = [n for n in lanes.positions(stage, *ir.ADDS_GRADIENTS) if n > begins[0]]
            if not after:
                raise lanes.fault(stage, begins[0], "no backward follows in which to add them up")
            if len(after) > 1:
                why = "a backward runs after the gradients of its stage were added up"
                raise lanes.fault(stage, after[1], f"{why} over replicas")


def ends(lanes: Lanes) -> None:
    """Check that a walk reaches the end of every program: no rank waits for ever."""
    for _ in walk_runs(lanes.schedule):
        pass


def posts(lanes: Lanes) -> None:
    """Check that each PostReceive stands once, before the receive of its message."""
    kinds: tuple[type[ir.Receive], ...] = (ir.ReceiveActivation, ir.ReceiveGradient)
    for stage in range(lanes.num_stages):
        if not lanes.positions(stage, ir.PostReceive):
            continue
        received = {
            x.message: position for kind in kinds for position, x in lanes.each(stage, kind)
        }
        seen: set[ir.Message] = set()
        for position, post in lanes.each(stage, ir.PostReceive):
            if post.message in seen:
                raise lanes.fault(stage, position, "it is posted twice")
            seen.add(post.message)
            if received.get(post.message, position) < position:
                raise lanes.fault(stage, position, "its receive stands before it")


_NOTHING = "there is nothing to recompute: its Forward kept its graph or has not run"
_DROPPED = "its Forward dropped its graph and no Recompute has rebuilt it"


def recomputes(lanes: Lanes) -> None:
    """Check that a Recompute stands between a Forward that dropped its graph and its Backward."""
    for stage in range(lanes.num_stages):
        forwards = lanes.each(stage, ir.Forward)
        dropped = {x.microbatch: position for position, x in forwards if not x.keep_graph}
        rebuilt: dict[int, int] = {}
        for position, x in lanes.each(stage, ir.Recompute):
            i = x.microbatch
            if i in rebuilt or dropped.get(i, position) >= position:
                raise lanes.fault(stage, position, _NOTHING)
            rebuilt[i] = position
        backwards = lanes.computes(stage, *ir.GIVES_GRADIENTS) if dropped else {}
        for i in dropped:
            if rebuilt.get(i, backwards[i]) >= backwards[i]:
                raise lanes.fault(stage, backwards[i], _DROPPED)


def in_order(lanes: Lanes) -> None:
    """Check that the forwards and the backwards of each stage come in micro-batch order.

    Sums are then made in the order of the unsplit model, so gradients are equal to the bit.
    """
    for stage in range(lanes.num_stages):
        _check(lanes, stage, "the forwards of a stage must come in micro-batch order", ir.Forward)
        for kinds in (ir.GIVES_GRADIENTS, ir.ADDS_GRADIENTS):
            _check(
                lanes,
                stage,
                "the backwards of a stage must come in micro-batch order, or gradients would not "
                "add up in the order of the unsplit model",
                *kinds,
            )


def _check(lanes: Lanes, stage: int, problem: str, *kinds: type[ir.Compute]) -> None:
    microbatches = lanes.microbatches(stage, *kinds)
    if microbatches != list(range(len(microbatches))):
        number = next(number for number, i in enumerate(microbatches) if i != number)
        raise lanes.fault(stage, lanes.positions(stage, *kinds)[number], problem)


_PAIRS: tuple[tuple[type[ir.Send], type[ir.Receive], str], ...] = (
    (ir.SendActivation, ir.ReceiveActivation, "activations"),
    (ir.SendGradient, ir.ReceiveGradient, "gradients"),
)


def messages(lanes: Lanes) -> None:
    """Check that both ends of each transfer name the same micro-batches in the same order."""
    for send, receive, what in _PAIRS:
        sent: dict[tuple[int, int], list[int]] = defaultdict(list)
        received: dict[tuple[int, int], list[int]] = defaultdict(list)
        # 1. Collect the micro-batches of each edge, as sent and as received.
        for stage in range(lanes.num_stages):
            for peer, lane in lanes.by_peer(send, stage).items():
                sent[stage, peer] = lane.microbatches
            for peer, lane in lanes.by_peer(receive, stage).items():
                received[peer, stage] = lane.microbatches
        # 2. Compare them, and check that the edge is a transfer.
        for source, target in sorted(sent.keys() | received.keys()):
            there, here = sent[source, target], received[source, target]
            if there != here or len(set(there)) < len(there):
                raise ScheduleError(
                    f"stage {source} sends {what} of micro-batches {there} to stage {target}, "
                    f"which receives {here}; both must name the same micro-batches in the same "
                    f"order, each once.\n{lanes.schedule}"
                )
            producer, consumer = (target, source) if send.gradient else (source, target)
            if consumer not in lanes.consumers.get(producer, ()):
                problem = f"stage {consumer} uses nothing of stage {producer}: there is no such"
                position = lanes.by_peer(send, source)[target].positions[0]
                raise lanes.fault(source, position, f"{problem} transfer")


def complete(lanes: Lanes) -> None:
    """Check that each stage has a Forward and a Backward, or both parts, of each micro-batch."""
    numbers = list(range(lanes.num_microbatches))
    for stage in range(lanes.num_stages):
        # 1. A stage is complete if its forwards and backwards, whole or in parts, add up.
        by_kind = [sorted(lanes.microbatches(stage, kind)) for kind in _KINDS]
        forwards, whole, inputs, weights = by_kind
        if forwards == numbers and inputs == weights and sorted(whole + inputs) == numbers:
            continue
        # 2. Otherwise find the first micro-batch at fault, and the kind with a wrong number.
        times = dict(zip(_KINDS, map(Counter, by_kind), strict=True))
        for i in range(lanes.num_microbatches):
            counts = tuple(times[kind][i] for kind in _KINDS)
            if counts in _RIGHT:
                continue
            right = _RIGHT[counts[1] == 0 and counts[2] > 0]
            of_each = zip(_KINDS, counts, right, strict=True)
            kind, number, wanted = next(x for x in of_each if x[1] != x[2])
            problem = (
                f"stage {stage} has {number} {kind.__name__} instructions for micro-batch {i}; it "
                f"needs exactly {'one' if wanted else 'none'}"
            )
            others = [place for place, x in lanes.each(stage, *_KINDS) if x.microbatch == i]
            if others:
                raise lanes.fault(stage, others[-1], problem)
            raise ScheduleError(f"{problem}.\n{lanes.schedule}")


_KINDS: tuple[type[ir.Compute], ...] = (
    ir.Forward,
    ir.Backward,
    ir.BackwardInput,
    ir.BackwardWeight,
)
_RIGHT = ((1, 1, 0, 0), (1, 0, 1, 1))
"""The number of each of `_KINDS` for a micro-batch: with a backward in one part, and in two."""


@dataclass(frozen=True, slots=True)
class AtMostBytes:
    """Check that each rank's activation memory, by `sizes`, is at most `limit_bytes`.

    With `Sizes(kept_bytes=1)` it limits the number of micro-batches in flight.

    Raises:
        ConfigError: sizes or limits are given for another number of stages or ranks.
    """

    sizes: Sizes
    limit_bytes: BytesPerRank

    def __call__(self, lanes: Lanes) -> None:
        kept, programs = self.sizes.of_stages(lanes.num_stages), lanes.schedule.programs
        for rank, limit in enumerate(self.limits(len(programs))):
            for position, live in enumerate(live_bytes(programs[rank], kept)):
                if live > limit:
                    problem = (
                        f"its rank then keeps {live:,} bytes, {live - limit:,} more than {limit:,}"
                    )
                    raise lanes.fault(programs[rank][position].stage, position, problem)

    def limits(self, num_ranks: int) -> tuple[int, ...]:
        """Return the limit of each rank, in bytes.

        Raises:
            ConfigError: limits are given for another number of ranks.
        """
        return one_each(self.limit_bytes, num_ranks, "limit_bytes", "rank")
