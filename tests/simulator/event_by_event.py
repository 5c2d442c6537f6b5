"""A second simulator, which knows no tricks: at each event it looks at every rank."""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from penstock.schedules import Schedule, ir
from penstock.simulator import Pool, Way
from penstock.simulator.engine import Edge


class EventByEvent:
    """Predicts when each instruction of each rank ends: `ends`, after `run()`."""

    def __init__(
        self,
        schedule: Schedule,
        seconds: Mapping[type, Sequence[Any]],
        ways: Mapping[Edge, Way],
        pools: Sequence[Pool],
    ) -> None:
        self.schedule, self.seconds, self.ways, self.pools = schedule, seconds, ways, pools
        self.clock: list[Any] = [0] * schedule.num_ranks
        self.left: dict[int, Any] = {}
        self.arrival: dict[ir.Message, Any] = {}
        self.free: dict[Any, Any] = {}
        self.ends: list[list[Any]] = [[] for _ in schedule.programs]
        self.limited = {rank: p for p in pools if p.turns is not None for rank in p.ranks}
        self.running: list[int] = []
        self.queues: dict[Pool, list[int]] = {pool: [] for pool in pools}
        self.waits: set[int] = set()

    def run(self) -> list[list[Any]]:
        while events := list(self.events()):
            now, is_end, rank = min(events)
            self.compute_until(now)
            if is_end:
                del self.left[rank]
            elif self.turn_changes(rank, now):
                continue
            elif self.begins_to_compute(rank):
                self.clock[rank] = now
                continue
            else:
                now = self.after(rank, now)
            self.clock[rank] = now
            self.ends[rank].append(now)
        return self.ends

    def next_of(self, rank: int) -> ir.Instruction | None:
        program, done = self.schedule.programs[rank], len(self.ends[rank])
        return program[done] if done < len(program) else None

    def speed(self, pool: Pool) -> Any:
        busy = sum(rank in self.left for rank in pool.ranks)
        if busy <= len(pool.speeds):
            return pool.speeds[busy - 1]
        return pool.speeds[-1] * len(pool.speeds) / Fraction(busy)

    def events(self) -> Iterator[tuple[Any, bool, int]]:
        """Yield when each rank could do something next, those that end a compute last."""
        for rank in range(self.schedule.num_ranks):
            x = self.next_of(rank)
            if rank in self.limited and (rank not in self.running or self.would_wait(rank)):
                yield from self.turn_events(rank)
            elif rank in self.left:
                speed = next(self.speed(pool) for pool in self.pools if rank in pool.ranks)
                yield self.clock[rank] + self.left[rank] / Fraction(speed), True, rank
            elif isinstance(x, ir.Receive):
                if x.message in self.arrival:
                    yield max(self.clock[rank], self.arrival[x.message]), False, rank
            elif x is not None:
                yield self.clock[rank], False, rank

    def would_wait(self, rank: int) -> bool:
        x, now = self.next_of(rank), self.clock[rank]
        if isinstance(x, ir.Receive):
            return x.message not in self.arrival or self.arrival[x.message] > now
        return x is None

    def turn_events(self, rank: int) -> Iterator[tuple[Any, bool, int]]:
        """Yield when a rank asks for its turn, or gives it away."""
        x = self.next_of(rank)
        if rank in self.queues[self.limited[rank]]:
            return
        if rank not in self.waits:
            yield self.clock[rank], False, rank
        elif isinstance(x, ir.Receive) and x.message in self.arrival:
            yield max(self.clock[rank], self.arrival[x.message]), False, rank

    def turn_changes(self, rank: int, now: Any) -> bool:
        """Let a rank ask for its turn, or give it away; say whether it was about that."""
        pool = self.limited.get(rank)
        if pool is None or (rank in self.running and not self.would_wait(rank)):
            return False
        queue = self.queues[pool]
        self.clock[rank] = now
        if rank in self.running:
            self.running.remove(rank)
            self.waits.add(rank)
            if queue:
                following = queue.pop(0)
                self.running.append(following)
                self.clock[following] = now + pool.turn_s
        else:
            self.waits.discard(rank)
            assert pool.turns is not None
            if sum(other in self.running for other in pool.ranks) < pool.turns:
                self.running.append(rank)
            else:
                queue.append(rank)
        return True

    def compute_until(self, now: Any) -> None:
        speeds = {rank: self.speed(p) for p in self.pools for rank in p.ranks if rank in self.left}
        for rank, speed in speeds.items():
            self.left[rank] -= (now - self.clock[rank]) * speed
            self.clock[rank] = now

    def begins_to_compute(self, rank: int) -> bool:
        """Begin an instruction that runs on shared cores; say whether it is one."""
        x = self.next_of(rank)
        assert x is not None
        work = self.seconds[type(x)][x.stage] if type(x) in self.seconds else 0
        if not work or not any(rank in pool.ranks for pool in self.pools):
            return False
        self.left[rank] = work
        return True

    def after(self, rank: int, now: Any) -> Any:
        """Run an instruction that shares no cores; return when it has ended."""
        x = self.next_of(rank)
        assert x is not None
        if not isinstance(x, ir.Communication):
            return now + (self.seconds[type(x)][x.stage] if type(x) in self.seconds else 0)
        source, target = (x.stage, x.peer) if isinstance(x, ir.Send) else (x.peer, x.stage)
        is_local = self.schedule.ranks[source] == self.schedule.ranks[target]
        way = Way() if is_local else self.ways[x.gradient, source, target]
        if isinstance(x, ir.Receive):
            return now + way.receive_s
        begin = max([now + way.send_s, *(self.free.get(lane, 0) for lane in way.lanes)])
        left = begin + way.lane_s
        self.free |= dict.fromkeys(way.lanes, left)
        self.arrival[x.message] = left + way.latency_s
        return left if way.blocks else now + way.send_s
