"""Run a compiled schedule on a clock: when does each instruction end?

Each rank runs its program in order.  What ranks share is asked for in the order of time, and the
lower rank first where times are equal:

    lanes    of links: a message holds all of its lanes until its last byte has left, and waits
             where one is taken: first come, first served
    pools    of ranks on the same cores: n of them that compute at a time are each as fast as n
             let them be

Where nothing is shared ranks run on until they have to wait, in any order: the times are the same.

A schedule comes in numbers, so that it is priced many times without being read again.  Every
instruction is an integer, its code:

    k >= 0        takes the seconds of price k: of a kind of instruction on a stage
    -2 m - 1      sends message m
    -2 m - 2      receives message m
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, repeat
from typing import NamedTuple

from penstock.schedules import ir
from penstock.schedules.collection import collection_paused

Edge = tuple[bool, int, int]
"""(is a gradient, from stage, to stage) of a message."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A lowered schedule in numbers.

    `codes[rank]` are those of its program.  `prices[k]` is one of the instructions that take
    price k, `edges[edge_of[m]]` is the edge along which message m goes.
    """

    schedule: ir.Schedule
    ranks: tuple[int, ...]
    """The rank that runs each stage."""
    codes: tuple[list[int], ...]
    prices: tuple[ir.Instruction, ...]
    edges: tuple[Edge, ...]
    edge_of: list[int]


@collection_paused()
def compiled(schedule: ir.Schedule) -> Compiled:
    """Write a schedule with its communication in numbers."""
    numbers: dict[tuple[type[ir.Instruction], int], int] = {}
    prices: list[ir.Instruction] = []
    edges: dict[Edge, int] = {}
    messages: dict[ir.Message, int] = {}
    edge_of: list[int] = []

    def message(x: ir.Send | ir.Receive) -> int:
        key = x.message
        number = messages.get(key)
        if number is None:
            number = messages[key] = len(edge_of)
            edge_of.append(edges.setdefault(key[:3], len(edges)))
        return number

    def code(x: ir.Instruction) -> int:
        if isinstance(x, ir.Send):
            return -2 * message(x) - 1
        if isinstance(x, ir.Receive):
            return -2 * message(x) - 2
        key = x.__class__, x.stage
        number = numbers.get(key)
        if number is None:
            number = numbers[key] = len(prices)
            prices.append(x)
        return number

    codes = tuple(list(map(code, program)) for program in schedule.programs)
    return Compiled(schedule, schedule.ranks, codes, tuple(prices), tuple(edges), edge_of)


class Way(NamedTuple):
    """How a message goes from rank to rank.

    The sender computes nothing for `send_s`, then the message takes `lane_s` on all `lanes` at
    once, waiting for none if there are none, and is there `latency_s` later; if it `blocks`, the
    sender waits until it has left.  The receiver computes nothing for `receive_s` from then on.
    """

    lanes: tuple[Hashable, ...] = ()
    lane_s: float = 0
    latency_s: float = 0
    send_s: float = 0
    receive_s: float = 0
    blocks: bool = False


@dataclass(frozen=True, slots=True)
class Pool:
    """Ranks that share cores: `speeds[n - 1]` is how fast each computes, beside being alone, while
    n of them do; more than there are entries share what that many get.
    """

    ranks: tuple[int, ...]
    speeds: tuple[float, ...]

    def speed(self, num_busy: int) -> float:
        """Return how fast each of so many ranks computes."""
        known = len(self.speeds)
        if num_busy <= known:
            return self.speeds[num_busy - 1]
        return self.speeds[-1] * known / num_busy


class _Shared:
    """A pool at work.

    `done` is how many seconds of work a rank would have done that had computed all the time: all
    that are busy are equally fast, so each ends when `done` has grown by its own work.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._since_s: float = 0
        self._done: float = 0
        self._busy: list[tuple[float, int]] = []
        self.version = 0

    def _advance(self, now_s: float) -> None:
        if self._busy:
            self._done += (now_s - self._since_s) * self._pool.speed(len(self._busy))
        self._since_s = now_s
        self.version += 1

    def begin(self, rank: int, now_s: float, work_s: float) -> None:
        """Let a rank begin so many seconds of work."""
        self._advance(now_s)
        heappush(self._busy, (self._done + work_s, rank))

    def next_end_s(self, now_s: float) -> float | None:
        """Return when the next rank will end its work, if no other begins before."""
        if not self._busy:
            return None
        left = max(0, self._busy[0][0] - self._done)
        return now_s + left / self._pool.speed(len(self._busy))

    def end(self, now_s: float) -> int:
        """Return the rank whose work ends now."""
        self._advance(now_s)
        self._done, rank = heappop(self._busy)
        return rank


class Engine:
    """One run of a compiled schedule; `ends_s[rank]` begins with 0 and grows as it is run.

    `seconds[k]` is price k, `ways[e]` how messages go along edge e; None: they stay on a rank.
    """

    def __init__(
        self,
        program: Compiled,
        seconds: Sequence[float],
        ways: Sequence[Way | None],
        pools: Sequence[Pool] = (),
    ) -> None:
        self._program = program
        self._edge_of = program.edge_of
        self._seconds = seconds
        self._ways = ways
        lanes = {lane for way in ways if way is not None for lane in way.lanes}
        self._free_s: dict[Hashable, float] = dict.fromkeys(lanes, 0)
        self._pools = [_Shared(pool) for pool in pools]
        self._pool_of: list[int] = [-1] * len(program.codes)
        for number, pool in enumerate(pools):
            for rank in pool.ranks:
                self._pool_of[rank] = number
        self._arrival_s: list[float | None] = [None] * len(program.edge_of)
        self._waiting: dict[int, tuple[float, int]] = {}
        self._ready: list[tuple[float, int, int]] = []
        self._unread = [iter(codes) for codes in program.codes]
        self._rest: list[Iterator[int]] = list(self._unread)
        self.position = [0] * len(program.codes)
        self.ends_s: list[list[float]] = [[0] for _ in program.codes]

    def run(self) -> None:
        """Run everything that can be run."""
        ready, num_ranks = self._ready, len(self._program.codes)
        ready.extend(zip(repeat(0), range(num_ranks), repeat(0)))
        while ready:
            now_s, who, version = heappop(ready)
            if who < num_ranks:
                self._advance(who, now_s)
                continue
            pool = self._pools[who - num_ranks]
            if version == pool.version:
                rank = pool.end(now_s)
                self.ends_s[rank].append(now_s)
                self.position[rank] += 1
                heappush(ready, (now_s, rank, 0))
                self._schedule_end(who - num_ranks, now_s)

    def _advance(self, rank: int, now_s: float) -> None:
        """Run a rank until it has to wait, has begun to compute on cores that it shares, or
        another one is to go first.
        """
        seconds, ends_s, number = self._seconds, self.ends_s[rank], self._pool_of[rank]
        add, ways, edge_of = ends_s.append, self._ways, self._edge_of
        for code in self._rest[rank]:
            if code >= 0:
                if number >= 0 and seconds[code]:
                    self._begin(rank, code, now_s, number)
                    break
                now_s += seconds[code]
            else:
                message = ~code >> 1
                pass_on = self._send if code & 1 else self._receive
                after_s = pass_on(rank, message, ways[edge_of[message]], now_s)
                if after_s is None:
                    self._hold(rank, code)
                    break
                now_s = after_s
            add(now_s)
        self.position[rank] = len(ends_s) - 1

    def _begin(self, rank: int, code: int, now_s: float, number: int) -> None:
        """Begin to compute on the cores of a pool, or after what is to happen before."""
        if self._is_early(rank, now_s):
            heappush(self._ready, (now_s, rank, 0))
            self._hold(rank, code)
            return
        self._pools[number].begin(rank, now_s, self._seconds[code])
        self._schedule_end(number, now_s)

    def _is_early(self, rank: int, now_s: float) -> bool:
        """Tell whether something else is to happen before a rank goes on."""
        return bool(self._ready) and self._ready[0] < (now_s, rank, 0)

    def _hold(self, rank: int, code: int) -> None:
        """Let a rank begin with this instruction when it goes on."""
        self._rest[rank] = chain((code,), self._unread[rank])

    def _schedule_end(self, number: int, now_s: float) -> None:
        pool = self._pools[number]
        end_s = pool.next_end_s(now_s)
        if end_s is not None:
            who = len(self._program.codes) + number
            heappush(self._ready, (end_s, who, pool.version))

    def _receive(self, rank: int, message: int, way: Way | None, now_s: float) -> float | None:
        """Return when a message has been received, None if the rank has to wait."""
        came_s = self._arrival_s[message]
        if came_s is None:
            self._waiting[message] = now_s, rank
            return None
        if came_s > now_s:
            now_s = came_s
        return now_s if way is None else now_s + way.receive_s

    def _send(self, rank: int, message: int, way: Way | None, now_s: float) -> float | None:
        """Return when a message has been sent, None if another rank is to go first."""
        came_s = now_s
        if way is not None:
            _, lane_s, latency_s, send_s, _, blocks = way
            came_s += send_s
            if way.lanes:
                if self._is_early(rank, now_s):
                    heappush(self._ready, (now_s, rank, 0))
                    return None
                came_s = self._pass(way.lanes, came_s, lane_s)
            else:
                came_s += lane_s
            now_s = came_s if blocks else now_s + send_s
            came_s += latency_s
        self._arrival_s[message] = came_s
        if message in self._waiting:
            since_s, receiver = self._waiting.pop(message)
            heappush(self._ready, (max(came_s, since_s), receiver, 0))
        return now_s

    def _pass(self, lanes: tuple[Hashable, ...], since_s: float, lane_s: float) -> float:
        """Hold all the lanes as soon as they are free; return when that has ended."""
        free_s = self._free_s
        for lane in lanes:
            if free_s[lane] > since_s:
                since_s = free_s[lane]
        since_s += lane_s
        for lane in lanes:
            free_s[lane] = since_s
        return since_s
