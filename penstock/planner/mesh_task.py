"""The task of planning stages on meshes of devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
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
from penstock.sharding.search import Search

from .arguments import Model
from .mesh_costs import MEMORY_POLICIES, MemoryPolicy, MeshPrices
from .pricing import Pricing, weights_together
from .stage_table import Numbers, Submesh

FAMILIES = (one_f_one_b, eager_1f1b, gpipe)
SHARDINGS = ("auto", "zero1", "zero2", "expert")
"""Ready plans that are tried: weights that are gathered once a step are in none but theirs."""
Try = tuple[int, str, MemoryPolicy]
"""A number of micro-batches, a ready plan and a memory policy."""


@dataclass(frozen=True)
class FewMeshes(MeshPrices):
    """Prices of stages on fewer meshes, for hosts or clusters of many devices.

    Parts of a host, and numbers of hosts, are powers of two or divide the whole: Alpa takes powers
    of two and whole hosts (section 5.2).  Of two axes the inner one is a power of two: the shorter
    one in a host, and the longest two that fit one, or all of it, on several.
    """

    def _may_be(self, submesh: Submesh) -> Numbers:
        num_hosts, num_devices, _ = self._hosts[submesh.kind]
        number, most = submesh.num_devices, num_devices
        if submesh.num_hosts > 1:
            number, most = submesh.num_hosts, num_hosts
        is_taken = number & (number - 1) == 0 or most % number == 0
        found: Numbers = super()._may_be(submesh) & is_taken
        return found

    def _shapes(self, submesh: Submesh) -> Sequence[tuple[int, ...]]:
        if submesh.shape or submesh.num_devices == 1:
            return super()._shapes(submesh)
        size, inside = submesh.size, submesh.num_devices
        powers = [1 << n for n in range(1, inside.bit_length()) if inside % (1 << n) == 0]
        if submesh.num_hosts > 1:
            return [(size // n, n) for n in sorted({*powers, inside})[-2:]]
        return [(size,), *((size // n, n) for n in powers if n * n <= size)]


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
            """Return the seconds of each layer in the profile, by those of the roofline.

            The issue of operators is no part of them: devices that divide a layer do not share it.
            """
            kind, size = cluster.places[0].kind, -(-batch_size // number)
            known = Pricing(profile, cluster, cuda_graphs=True).seconds(kind, size, number)
            roofline_s = layers_s(graph_of(number), len(operators.names), Costs((1,), cluster))
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

    def quick(self, first_number: int) -> "MeshTask":
        """Return the task of a search on few meshes, which climbs numbers of micro-batches."""
        return replace(self, prices=FewMeshes, first_number=first_number)

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

        A price of bytes is tried with the first ready plan only: the others leave little choice.
        """
        every = product(self.numbers, self.shardings, self.policies)
        return [own for own in every if own[1] == self.shardings[0] or not own[2].byte_s]


def _state_of(profile: Profile) -> StateRatio:
    """Return the bytes of gradients and optimizer state for each byte of a model's weights."""
    own = weights_together(profile.weights)
    if not own.parameter_bytes:
        return USUAL_STATE
    kinds = own.gradient_bytes, own.optimizer_bytes, own.moved_bytes
    return StateRatio(*(size / own.parameter_bytes for size in kinds))
