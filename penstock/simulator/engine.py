"""Run a compiled schedule on a clock: when does each instruction end?

Each rank runs its program in order.  Ranks get shared resources in the order of time, and at
equal times the lower rank comes first:

    lanes    of links: a message holds all of its lanes until its last byte has left, and waits
             for a busy one: first come, first served
    pools    of ranks on the same cores: the more of them compute at a time, the slower each is

Without shared resources a rank runs on until it has to wait: the order does not change the times.

A compiled schedule is priced many times without being read again.  Every instruction is an
integer, its code:

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
from penstock.schedules.walk import collection_paused

Edge = tuple[bool, int, int]
"""(is a gradient, from stage, to stage) of a message."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A lowered schedule in numbers."""

    schedule: ir.Schedule
    ranks: tuple[int, ...]
    """The rank that runs each stage."""
    codes: tuple[list[int], ...]
    """The program of each rank."""
    prices: tuple[ir.Instruction, ...]
    """One instruction for each price."""
    edges: tuple[Edge, ...]
    edge_of: list[int]
    """The index in `edges` of each message."""


@collection_paused()
def compiled(schedule: ir.Schedule) -> Compiled:
    """Write a schedule with its communication in numbers."""
    numbers: dict[tuple[type[ir.Instruction], int], int] = {}
    prices: list[ir.Instruction] = []
    edges: dict[Edge, int] = {}
    messages: dict[ir.Message, int] = {}
    edge_of: list[int] = []

    # Number messages, edges and prices in the order in which they first come.
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
    """The path and the times of a message from rank to rank.

    sender     ████ send_s, and lane_s too if the message `blocks`
    lanes          ▒▒▒▒▒▒ lane_s on all of them at once, once they are free
    on its way           ┄┄┄ latency_s
    receiver                ████ receive_s
    """

    lanes: tuple[Hashable, ...] = ()
    lane_s: float = 0
    latency_s: float = 0
    send_s: float = 0
    receive_s: float = 0
    blocks: bool = False


@dataclass(frozen=True, slots=True)
class Pool:
    """Ranks that share cores."""

    ranks: tuple[int, ...]
    speeds: tuple[float, ...]
    """speeds[n - 1] is the speed of each of n computing ranks, relative to one alone.  More ranks
    than entries share the total speed of the last."""

    def speed(self, num_busy: int) -> float:
        """Return the speed of each of so many computing ranks."""
        known = len(self.speeds)
        if num_busy <= known:
            return self.speeds[num_busy - 1]
        return self.speeds[-1] * known / num_busy


class _Shared:
    """The state of a pool.

    `done` counts the seconds of work of a rank that computes all the time.  All busy ranks are
    equally fast, so each ends when `done` has grown by its work.
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
        self._advance(now_s)
        heappush(self._busy, (self._done + work_s, rank))

    def next_end_s(self, now_s: float) -> float | None:
        """Return the time at which the next rank ends its work, if no other begins before."""
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
    """One run of a compiled schedule; `ends_s[rank]` begins with 0 and gets an end for each code.

    `seconds[k]` is price k, `ways[e]` the way of messages along edge e; None: they stay on a rank.
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
        """Run every instruction whose message comes."""
        ready, num_ranks = self._ready, len(self._program.codes)
        ready.extend(zip(repeat(0), range(num_ranks), repeat(0)))
        while ready:
            # Numbers from num_ranks on are pools: the work of a rank on shared cores ends.
            now_s, number, version = heappop(ready)
            if number < num_ranks:
                self._advance(number, now_s)
                continue
            pool = self._pools[number - num_ranks]
            if version == pool.version:  # else the number of busy ranks has changed since
                rank = pool.end(now_s)
                self.ends_s[rank].append(now_s)
                self.position[rank] += 1
                heappush(ready, (now_s, rank, 0))
                self._schedule_end(number - num_ranks, now_s)

    def _advance(self, rank: int, now_s: float) -> None:
        """Run a rank until it waits, computes on shared cores, or another one goes first."""
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
        """Begin to compute on the cores of a pool, or return later if others go first."""
        if self._is_early(rank, now_s):
            heappush(self._ready, (now_s, rank, 0))
            self._hold(rank, code)
            return
        self._pools[number].begin(rank, now_s, self._seconds[code])
        self._schedule_end(number, now_s)

    def _is_early(self, rank: int, now_s: float) -> bool:
        """Tell whether something else happens before a rank goes on."""
        return bool(self._ready) and self._ready[0] < (now_s, rank, 0)

    def _hold(self, rank: int, code: int) -> None:
        """Let a rank begin with this instruction when it goes on."""
        self._rest[rank] = chain((code,), self._unread[rank])

    def _schedule_end(self, number: int, now_s: float) -> None:
        pool = self._pools[number]
        end_s = pool.next_end_s(now_s)
        if end_s is not None:
            heappush(self._ready, (end_s, len(self._program.codes) + number, pool.version))

    def _receive(self, rank: int, message: int, way: Way | None, now_s: float) -> float | None:
        """Return the end of a receive, None if the rank has to wait."""
        came_s = self._arrival_s[message]
        if came_s is None:
            self._waiting[message] = now_s, rank
            return None
        if came_s > now_s:
            now_s = came_s
        return now_s if way is None else now_s + way.receive_s

    def _send(self, rank: int, message: int, way: Way | None, now_s: float) -> float | None:
        """Return the end of a send, None if another rank goes first."""
        came_s = now_s
        if way is not None:
            _, lane_s, latency_s, send_s, _, blocks = way
            came_s += send_s
            # Lanes are taken in the order of time: an earlier event runs first.
            if way.lanes:
                if self._is_early(rank, now_s):
                    heappush(self._ready, (now_s, rank, 0))
                    return None
                came_s = self._pass(way.lanes, came_s, lane_s)
            else:
                came_s += lane_s
            now_s = came_s if blocks else now_s + send_s
            came_s += latency_s
        # Wake the receiver, at the arrival or when it began to wait, whichever is later.
        self._arrival_s[message] = came_s
        if message in self._waiting:
            since_s, receiver = self._waiting.pop(message)
            heappush(self._ready, (max(came_s, since_s), receiver, 0))
        return now_s

    def _pass(self, lanes: tuple[Hashable, ...], since_s: float, lane_s: float) -> float:
        """Hold all lanes once they are free; return the time at which they are free again."""
        # The last lane to become free decides when the message begins.
        free_s = self._free_s
        for lane in lanes:
            if free_s[lane] > since_s:
                since_s = free_s[lane]
        since_s += lane_s
        for lane in lanes:
            free_s[lane] = since_s
        return since_s
