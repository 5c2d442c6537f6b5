"""Transfers: the edges between stages along which a schedule sends and receives."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The values that stage `consumer` needs of stage `producer` for each micro-batch.

    They travel to the consumer after a forward, and their gradients back after a backward.  A
    transfer may skip stages.
    """

    producer: int
    consumer: int
    values: tuple[str, ...] = ()
    """The names of the values."""

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
