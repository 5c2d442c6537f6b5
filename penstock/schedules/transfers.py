"""What crosses between stages: the edges along which a schedule sends and receives."""

from collections.abc import Collection, Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What stage `consumer` needs of stage `producer` for each micro-batch.

    Its values travel from the producer to the consumer after a forward, their gradients back after
    a backward.  It may skip stages.

    `values` are names; `shapes` those of a whole micro-batch, where they are known before it runs.
    `laid_out` and `wanted` are the layouts in which the producer has the values and the consumer
    wants them, where stages are sharded; None: as they are.
    """

    producer: int
    consumer: int
    values: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] | None = None
    laid_out: Hashable = None
    wanted: Hashable = None

    def __str__(self) -> str:
        return f"{self.producer} -> {self.consumer}: {', '.join(self.values)}"


Transfers = Collection[Transfer]


def chain_transfers(num_stages: int) -> tuple[Transfer, ...]:
    """Return the transfers of a plain chain: every stage feeds the next."""
    return tuple(Transfer(producer=stage, consumer=stage + 1) for stage in range(num_stages - 1))


def neighbours(transfers: Transfers) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return the producers of each consumer and the consumers of each producer, in order."""
    producers: dict[int, list[int]] = {}
    consumers: dict[int, list[int]] = {}
    for producer, consumer in sorted({(t.producer, t.consumer) for t in transfers}):
        producers.setdefault(consumer, []).append(producer)
        consumers.setdefault(producer, []).append(consumer)
    return producers, consumers
