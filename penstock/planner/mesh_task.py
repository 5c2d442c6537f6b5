"""The task of planning stages on meshes of devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf

from penstock.costs.cluster import Cluster
from penstock.costs.counting.graph import Graph
from penstock.schedules import eager_1f1b, gpipe, one_f_one_b
from penstock.schedules.family import Family
from penstock.sharding.search import Search

from .arguments import Model
from .mesh_costs import MEMORY_POLICIES, MemoryPolicy, MeshPrices

FAMILIES = (one_f_one_b, eager_1f1b, gpipe)
SHARDINGS = ("auto", "zero1", "zero2", "expert")
"""Ready plans that are tried: weights that are gathered once a step are in none but theirs."""


@dataclass(frozen=True, kw_only=True)
class MeshTask:
    """A planning task: a model, the graphs of its micro-batches, and a cluster.

    `graph_of(M)` is the graph of one of M micro-batches, and `names` are its layers.
    `factors_of(M)` are the seconds of each layer over those of the roofline; () means 1.
    `shardings`, `prices` and `policies` restrict the search.  Copies of a task share `searches`,
    by number of micro-batches, sharding and factors.
    """

    model: Model
    names: Sequence[str]
    graph_of: Callable[[int], Graph]
    cluster: Cluster
    batch_size: int
    num_microbatches: int | None = None
    families: Sequence[Family] = FAMILIES
    shardings: Sequence[str] = SHARDINGS
    prices: Callable[..., MeshPrices] = MeshPrices
    policies: Sequence[MemoryPolicy] = MEMORY_POLICIES
    factors_of: Callable[[int], tuple[float, ...]] = lambda number: ()
    limit_s: float = inf
    """Seconds that a step must be below; inf: any."""
    searches: dict[object, dict[object, Search]] = field(default_factory=dict)

    @property
    def numbers(self) -> list[int]:
        """The numbers of micro-batches that are tried."""
        if self.num_microbatches is not None:
            return [self.num_microbatches]
        most = min(self.batch_size, 8 * len(self.cluster.places))
        powers = (1 << n for n in range(most.bit_length()))
        return [number for number in powers if self.batch_size % number == 0]

    @property
    def tries(self) -> list[tuple[int, str, MemoryPolicy]]:
        """Numbers of micro-batches, ready plans and memory policies to try together.

        A price of bytes is tried with the first ready plan only: the others leave little choice.
        """
        every = product(self.numbers, self.shardings, self.policies)
        return [own for own in every if own[1] == self.shardings[0] or not own[2].byte_s]
