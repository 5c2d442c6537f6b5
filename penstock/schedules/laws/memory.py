"""The law of memory: no rank keeps more bytes than it may."""

from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.schedules.memory import BytesPerRank, Sizes, live_bytes

from .lanes import Lanes


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
