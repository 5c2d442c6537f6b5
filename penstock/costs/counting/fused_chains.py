"""Price chains of elementwise operators as the single kernels that a compiler makes of them.

    linear ──► [ add ──► gelu ──► layer_norm ] ──► linear      one kernel forward, one backward

A kernel reads the values that enter its chain once, and writes the values that leave it.  Matrix
products, convolutions and fused attention end a chain; reductions and norms are part of one.  A
chain stays inside a layer, since layers are compiled one by one.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.costs.records import VIEW, Operator, Part

from .graph import Call, Graph

_FUSES = {"elementwise", "reduce", "norm", "copy"}
"""Classes of operators that a chain may have."""


def fused(graph: Graph) -> Graph:
    """Return a graph whose calls have the operators of compiled layers.

    The call that moves most bytes of a chain has the chain's kernels, and the others have none.
    Views are gone: no kernel runs for them, and compiled code does not issue them.  FLOPs, saved
    bytes and edges stay as they are; a value that is saved inside a chain is computed again from
    the values that enter it.
    """
    flows = _Flows(graph)
    operators = {n: _kernels(call) for n, call in enumerate(graph.calls)}
    for chain in flows.chains():
        carrier = max(chain, key=lambda n: sum(x.num_bytes for x in operators[n]))
        merged = [x for n in chain for x in operators[n]]
        operators.update(dict.fromkeys(chain, ()))
        operators[carrier] = tuple(_merged(merged, *flows.spared(chain)))
    calls = tuple(replace(call, operators=operators[n]) for n, call in enumerate(graph.calls))
    return replace(graph, calls=calls)


def _kernels(call: Call) -> tuple[Operator, ...]:
    return tuple(x for x in call.operators if x.name != VIEW)


def _merged(operators: Sequence[Operator], forward: int, backward: int) -> Iterator[Operator]:
    """Yield an operator for each part, without the bytes spared forward and backward."""
    for part in Part:
        own = [x for x in operators if x.part is part]
        if not own:
            continue
        moved = sum(x.num_bytes * x.count for x in own)
        if part is Part.FORWARD:
            left = moved - forward
        else:
            left, backward = moved - backward, max(0, backward - moved)
        if left > 0:
            largest = max(own, key=lambda x: x.num_bytes)
            yield replace(largest, num_bytes=left, count=1)


@dataclass(frozen=True, slots=True)
class _Flow:
    """A value without its views."""

    num_bytes: int
    maker: int | None
    """The call that made it; None for what enters the model."""
    users: tuple[int, ...]
    """The calls that read it or a view of it."""
    wants_gradient: bool
    is_output: bool

    @property
    def num_users(self) -> int:
        """Number of its users; the caller of the model is one."""
        return len(self.users) + self.is_output


class _Flows:
    """The values of a graph, and the chains that they connect."""

    def __init__(self, graph: Graph) -> None:
        self._calls = graph.calls
        self._backwards = [
            sum(x.part is not Part.FORWARD for x in _kernels(call)) for call in graph.calls
        ]
        self._fuses = [_is_in_chain(call) for call in graph.calls]
        # 1. A view is the value that it is a view of.
        origin = list(range(len(graph.tensors)))
        users: dict[int, dict[int, None]] = defaultdict(dict)
        for number, call in enumerate(graph.calls):
            if _is_view(call):
                for given in call.gives:
                    origin[given] = origin[call.takes[0]]
                continue
            for taken in call.takes:
                users[origin[taken]][number] = None
        # 2. The other values have a maker and users.
        outputs = {origin[n] for n in graph.outputs}
        self._flows = {
            n: _Flow(spec.num_bytes, spec.maker, (*users[n],), spec.wants_gradient, n in outputs)
            for n, spec in enumerate(graph.tensors)
            if origin[n] == n
        }
        self._taken = [[*dict.fromkeys(origin[n] for n in call.takes)] for call in graph.calls]

    def chains(self) -> list[list[int]]:
        """Return the calls of each chain.

        The calls of a chain have the same level, the most borders of chains on any way to them.
        So no way leads out of a chain and into it again.
        """
        levels: list[int] = []
        chain_of: dict[int, list[int]] = {}
        for number in range(len(self._calls)):
            made = (self._flows[n].maker for n in self._taken[number])
            makers = [maker for maker in made if maker is not None]
            joins = [m for m in makers if self._joins(m, number)]
            levels.append(max((levels[m] + (m not in joins) for m in makers), default=0))
            if not self._fuses[number]:
                continue
            chain = [number]
            for maker in joins:
                if levels[maker] == levels[number] and chain_of[maker] is not chain:
                    chain = chain_of[maker] + chain
                    chain_of.update(dict.fromkeys(chain, chain))
            chain_of[number] = chain
        return [*{id(chain): chain for chain in chain_of.values()}.values()]

    def _joins(self, maker: int, user: int) -> bool:
        same_layer = self._calls[maker].layer == self._calls[user].layer
        return same_layer and self._fuses[maker] and self._fuses[user]

    def spared(self, chain: Sequence[int]) -> tuple[int, int]:
        """Return the bytes that a chain's kernels do not move, forward and backward."""
        members = set(chain)
        touched = {n for call in chain for n in (*self._calls[call].gives, *self._taken[call])}
        forward = backward = 0
        for flow in (self._flows[n] for n in sorted(touched) if n in self._flows):
            inside = sum(user in members for user in flow.users)
            if flow.maker not in members:
                forward += flow.num_bytes * max(0, inside - 1)  # read once
                continue
            leaves = inside < flow.num_users
            forward += flow.num_bytes * (inside + (not leaves and inside > 0))
            if flow.wants_gradient:
                backward += flow.num_bytes * self._spared_gradients(flow, inside, members)
        return forward, backward

    def _spared_gradients(self, flow: _Flow, inside: int, members: set[int]) -> int:
        """Return how often a kernel spares a read or write of a gradient of an inner value.

        One by one, users inside write their gradients, sums read two and write one, and the maker
        reads the last.  Fused, the gradients from outside are read.  A maker without a backward
        of its own hands the sum on, which is then written.
        """
        sums = max(0, flow.num_users - 1)
        assert flow.maker is not None, "members make it"
        reads = self._backwards[flow.maker] > sums
        writes = sum(user in members and self._backwards[user] > 0 for user in flow.users)
        alone = writes + 3 * sums + reads
        together = flow.num_users - inside + (not reads and alone > 0)
        return max(0, alone - together)


def _is_view(call: Call) -> bool:
    return bool(call.takes) and not any(x.part is Part.FORWARD for x in _kernels(call))


def _is_in_chain(call: Call) -> bool:
    kernels = _kernels(call)
    return bool(kernels) and not _is_view(call) and {x.name for x in kernels} <= _FUSES
