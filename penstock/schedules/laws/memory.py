"""Laws: no stage keeps more micro-batches, and no rank more bytes, than it may."""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.schedules import ir
from penstock.schedules.memory import BytesPerRank, Sizes, live_bytes

from .lanes import Lanes


@dataclass(frozen=True, slots=True)
class AtMostLive:
    """Check that at most `limit` micro-batches are between Forward and the end of their Backward,
    or BackwardWeight, on any stage.
    """

    limit: int

    def __call__(self, lanes: Lanes) -> None:
        for stage in range(lanes.num_stages):
            for position, live in _live(lanes, stage):
                if live > self.limit:
                    problem = f"its stage keeps {live} micro-batches alive, more than {self.limit}"
                    raise lanes.fault(stage, position, problem)


@dataclass(frozen=True, slots=True)
class AtMostBytes:
    """Check that what each rank keeps, in bytes of `sizes`, is at most `limit_bytes`.

    With `Sizes(kept_bytes=1)` the limit is one of micro-batches alive.

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
        given = self.limit_bytes
        each = given if isinstance(given, tuple) else (given,) * num_ranks
        if len(each) != num_ranks:
            raise ConfigError(
                f"limit_bytes has {len(each)} entries, the schedule has {num_ranks} ranks: give "
                "one number for each rank, or one for all"
            )
        return each


def peak_live(lanes: Lanes, stage: int) -> int:
    """Return the most micro-batches that are between Forward and the end of their Backward, or
    BackwardWeight, on `stage`.
    """
    return max((live for _, live in _live(lanes, stage)), default=0)


def _live(lanes: Lanes, stage: int) -> Iterator[tuple[int, int]]:
    """Yield (position, number of live micro-batches) after each Forward."""
    backwards, done = lanes.positions(stage, *ir.ADDS_GRADIENTS), 0
    for number, position in enumerate(lanes.positions(stage, ir.Forward), 1):
        while done < len(backwards) and backwards[done] < position:
            done += 1
        yield position, number - done
