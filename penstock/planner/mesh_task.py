"""The task of planning stages on meshes of devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from math import inf
from typing import Any

from penstock.costs.cluster import Cluster
from penstock.costs.counting.graph import Graph
from penstock.costs.profile import Profile
from penstock.schedules import eager_1f1b, gpipe, one_f_one_b
from penstock.schedules.family import Family
from penstock.sharding.costs import USUAL_STATE, Costs, StateRatio
from penstock.sharding.program import layers_s
from penstock.sharding.routed import with_end
from penstock.sharding.search import Search

from .arguments import Model
from .mesh_costs import MeshPrices
from .pricing import Pricing, weights_together
from .submeshes import MEMORY_POLICIES, MemoryPolicy, few_shapes, shapes_within

FAMILIES = (one_f_one_b, eager_1f1b, gpipe)
SHARDINGS = ("auto", "zero1", "zero2", "expert")
"""Ready plans that are tried: weights that are gathered once a step are in none but theirs."""
Try = tuple[int, str, tuple[MemoryPolicy, ...]]
"""A number of micro-batches, a ready plan, and the memory policies of which each stage has one."""
FIRST_NUMBER = 16
"""Micro-batches with which a quick search begins."""


@dataclass(frozen=True, kw_only=True)
class MeshTask:
    """A planning task: a model, the graphs of its micro-batches, and a cluster.

    `graph_of(M)` is the graph of one of M micro-batches, and `names` are its layers.
    `factors_of(M)` are the seconds of each layer over those of the roofline; () means 1.
    `shardings`, `prices` and `policies` restrict the search.  Copies of a task share `searches`,
    by number of micro-batches, sharding and factors, and what is `known` to all their costs.
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
    state: StateRatio = USUAL_STATE
    """Bytes of weights, gradients and optimizer state for each byte of a weight."""
    limit_s: float = inf
    """Seconds that a step must be below; inf: any."""
    first_number: int | None = None
    """Where a quick search begins to climb numbers of micro-batches; None: it tries all."""
    first_sizes: tuple[int, int] | None = None
    """The fewest and most devices of meshes with which a quick search begins; None: any."""
    searches: dict[object, dict[object, Search]] = field(default_factory=dict)
    known: dict[object, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        profile: Profile,
        cluster: Cluster,
        batch_size: int,
        num_microbatches: int | None = None,
    ) -> "MeshTask":
        """Return the task of a profile that knows the operators; layers count as measured."""
        operators = profile.operators

        @cache
        def graph_of(number: int) -> Graph:
            graph: Graph = operators.graph_of(-(-batch_size // number))
            return graph

        @cache
        def factors_of(number: int) -> tuple[float, ...]:
            """Return the seconds of each layer in the profile, by those of the roofline; the last
            has the code after it, or the loss, in both.

            The issue of operators is no part of them: devices that divide a layer do not share it.
            """
            kind, size = cluster.places[0].kind, -(-batch_size // number)
            known = Pricing(profile, cluster, cuda_graphs=True).seconds(kind, size, number)
            count, costs = len(operators.names), Costs((1,), cluster)
            *roofline_s, end_s = layers_s(with_end(graph_of(number), count), count + 1, costs)
            roofline_s[-1] += end_s
            return tuple(
                (own.forward_s + own.backward_s) / s or 1.0 if s else 1.0
                for own, s in zip(known, roofline_s, strict=True)
            )

        return cls(
            model=Model(profile.layers, profile.spans),
            names=operators.names,
            graph_of=graph_of,
            cluster=cluster,
            batch_size=batch_size,
            num_microbatches=num_microbatches,
            factors_of=factors_of,
            state=_state_of(profile),
        )

    def quick(
        self, first_number: int = FIRST_NUMBER, first_sizes: tuple[int, int] | None = None
    ) -> "MeshTask":
        """Return the task of a search on few meshes, which climbs numbers of micro-batches."""
        return replace(
            self,
            prices=partial(MeshPrices, shapes=few_shapes),
            first_number=first_number,
            first_sizes=first_sizes,
        )

    def prices_of(
        self,
        number: int,
        sharding: str,
        policies: Sequence[MemoryPolicy],
        sizes: tuple[int, int] | None = None,
    ) -> MeshPrices:
        """Return the prices of stages for so many micro-batches, by a ready plan and policies, on
        meshes of any size, or with the fewest to the most devices that `sizes` has.
        """
        factors = self.factors_of(number)
        shared = self.searches.setdefault((number, sharding, factors), {})
        how = self.cluster, number, sharding, policies, shared, factors, self.state, self.known
        found = self.prices(self.graph_of(number), self.names, self.model.spans, *how)
        if sizes is None:
            return found
        return replace(found, shapes=partial(shapes_within, sizes, found.shapes))

    @property
    def numbers(self) -> list[int]:
        """The numbers of micro-batches that are tried."""
        if self.num_microbatches is not None:
            return [self.num_microbatches]
        most = min(self.batch_size, 8 * len(self.cluster.places))
        powers = (1 << n for n in range(most.bit_length()))
        return [number for number in powers if self.batch_size % number == 0]

    @property
    def tries(self) -> list[Try]:
        """Numbers of micro-batches, ready plans and memory policies to try together.

        Stages price bytes all or none, as a plan's limit of memory is that of all its stages.  A
        price of bytes is tried with the first ready plan only: the others leave little choice.
        Without weights of experts, "expert" allows no more than "auto".
        """
        with_bytes = tuple(own for own in self.policies if own.byte_s)
        groups = dict.fromkeys((self.without_byte_prices, with_bytes or self.without_byte_prices))
        names = [x for x in self.shardings if x != "expert" or "auto" not in self.shardings]
        every = product(self.numbers, self.shardings if self._has_experts else names, groups)
        return [own for own in every if own[1] == self.shardings[0] or own[2] != with_bytes]

    @property
    def _has_experts(self) -> bool:
        """Tell whether a weight has a dimension beside the two of a product, such as experts."""
        tensors = self.graph_of(self.numbers[0]).tensors
        return any(spec.name and len(spec.shape) > 2 for spec in tensors)

    @property
    def without_byte_prices(self) -> tuple[MemoryPolicy, ...]:
        """The memory policies that do not price bytes; all if each does."""
        return tuple(own for own in self.policies if not own.byte_s) or tuple(self.policies)


def _state_of(profile: Profile) -> StateRatio:
    """Return the bytes of gradients and optimizer state for each byte of a model's weights."""
    own = weights_together(profile.weights)
    if not own.parameter_bytes:
        return USUAL_STATE
    kinds = own.gradient_bytes, own.optimizer_bytes, own.moved_bytes
    return StateRatio(*(size / own.parameter_bytes for size in kinds))
