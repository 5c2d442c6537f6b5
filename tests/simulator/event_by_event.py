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

    def run(self) -> list[list[Any]]:
        while events := list(self.events()):
            now, is_end, rank = min(events)
            self.compute_until(now)
            if is_end:
                del self.left[rank]
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
            if rank in self.left:
                speed = next(self.speed(pool) for pool in self.pools if rank in pool.ranks)
                yield self.clock[rank] + self.left[rank] / Fraction(speed), True, rank
            elif isinstance(x, ir.Receive):
                if x.message in self.arrival:
                    yield max(self.clock[rank], self.arrival[x.message]), False, rank
            elif x is not None:
                yield self.clock[rank], False, rank

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
