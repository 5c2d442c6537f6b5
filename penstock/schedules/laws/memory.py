"""The law of memory: no rank keeps more bytes than it may."""

from dataclasses import dataclass

from penstock.schedules.costs import one_each
from penstock.schedules.memory import BytesPerRank, Sizes, live_bytes

from .lanes import Lanes


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
