"""Split one backward in two: the gradients of a stage's inputs first, those of its weights later.

    roots ──► linear ──► gelu ──► linear ──► norm ──► entries     input backward: autograd runs
                ╎                   ╎          └────► its weight  once, all but the cut edges
                ╎ cut               ╎ cut
                ▼                   ▼
              weight              weight                          weight backward: from the
                                                                  operator's input and the
                                                                  gradient of its result

The edges from heavy operators to their weights are cut.  The input backward computes all other
gradients and keeps them: only the weight backward changes `.grad` of parameters.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from penstock.errors import StateError
from penstock.model.entries import Entry, version_of
from penstock.torch_private import has_tensor_hooks, run_engine, without_torch_function

from .weight_gradients import LEAF, OPERATORS, Cut, cut_of

CHECKPOINT = "CheckpointFunctionBackward"
"""The node of a checkpoint with use_reentrant=True, which calls autograd inside its backward."""


@dataclass(frozen=True, slots=True)
class Division:
    """The division of a graph: gradients behind its `cuts` wait for the weight backward.

    `arrivals` counts the edges to each node.  `now` are the leaves whose gradients the input
    backward computes.  `uncut` has operators that could be cut by their name, with the reason
    against it.  `obstacle` is the node that makes the whole backward one part, or None.
    """

    arrivals: Mapping[Node, int]
    now: Sequence[Any]
    cuts: Mapping[Node, Cut]
    uncut: Mapping[Node, str]
    obstacle: Any

    @property
    def is_whole(self) -> bool:
        """True if no gradient waits."""
        return self.obstacle is not None or not self.cuts


class SplitBackward:
    """Runs the backward of one graph in two parts, `run_input` and `run_weights`."""

    def __init__(
        self, entries: Sequence[Entry], leaves: Sequence[Any], cuts: Mapping[Node, Cut]
    ) -> None:
        self._entries, self._leaves, self._cuts = entries, leaves, cuts
        self._kept: list[tuple[GradientEdge, Tensor]] = []
        self._groups: list[list[Cut]] = []
        for node, cut in cuts.items():
            node.register_prehook(cut.catch)

    @property
    def waiting(self) -> list[Tensor]:
        """The tensors kept between the two parts, except sparse gradients."""
        gradients = [gradient for _, gradient in self._kept]
        cuts = [cut for group in self._groups for cut in group]
        tensors = [*gradients, *(tensor for cut in cuts for tensor, _ in cut.needs)]
        return [tensor for tensor in tensors if tensor.layout is torch.strided]

    def run_input(self, roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Run autograd once, and free the graph; entries catch their gradients.

        A StateError refuses a user's function whose backward has added to a parameter's `.grad`.
        """
        # 1. Ask autograd for the gradients at entries, at leaves that do not wait, and at cuts.  A
        #    cut operator stops there: its hook catches the gradient of its result.
        entries, leaves, cuts = self._entries, self._leaves, self._cuts
        ends: list[Any] = [way[-1] for cut in cuts.values() for way in cut.ways]
        parameters = [leaf.variable for leaf in (*leaves, *ends)]
        before = _gradient_versions(parameters)
        nodes = [*(entry.node for entry in entries), *leaves, *cuts]
        targets = [GradientEdge(node, 0) for node in nodes]
        with _adding_to_shared([*leaves, *ends]) as added:
            results = iter(torch.autograd.grad(roots, targets, gradients, allow_unused=True))
        if added or _gradient_versions(parameters) != before:
            raise StateError(
                "the backward of a torch.autograd.Function has added to the .grad of a parameter "
                "by a backward of its own, which is too early where weights have a backward of "
                "their own. Zero the gradients; return the gradient instead (for a checkpoint: "
                "use_reentrant=False), or use a schedule whose backward is in one part"
            )

        # 2. Sort the gradients: entries first, then leaves, then cuts.
        for entry in entries:
            entry.caught.append(next(results))
        pairs = zip(targets[len(entries) :], (next(results) for _ in leaves), strict=False)
        self._kept = [(edge, gradient) for edge, gradient in pairs if gradient is not None]
        for cut, gradient in zip(cuts.values(), results, strict=True):
            if not cut.caught:  # the node did not have to run, and so called no hook
                cut.catch([gradient])
        self._groups = _grouped(cut for cut in cuts.values() if cut.caught[0] is not None)
        self._entries, self._leaves, self._cuts = [], [], {}

    def run_weights(self) -> None:
        """Add the gradients to the parameters.

        Gradients are added once they need more memory than their freed inputs.  Gradients that
        meet in one leaf are added together, as one sum.
        """
        # Gradients that the input backward computed come first; then group after group, added as
        # soon as they need more memory than their freed inputs had.
        edges = [edge for edge, _ in self._kept]
        gradients = [gradient for _, gradient in self._kept]
        self._kept, more = [], 0
        with torch.no_grad(), without_torch_function():
            while self._groups:
                for cut in self._groups.pop(0):
                    computed, added = cut.compute()
                    edges += cut.edges.values()
                    gradients += computed
                    more += added
                if more > 0:
                    _add(edges, gradients)
                    edges, gradients, more = [], [], 0
            _add(edges, gradients)


def _add(edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Let autograd add gradients, without torch's checks of each: these cost more than a sum."""
    if edges:
        options = {"allow_unreachable": True, "accumulate_grad": True}
        run_engine(tuple(edges), tuple(gradients), False, False, (), **options)


def divide(roots: Sequence[Tensor], ends: set[Any]) -> Division:
    """Decide which weight gradients wait; gradients of the nodes `ends` never wait."""
    arrivals = arrivals_of([get_gradient_edge(root).node for root in roots])
    leaves, cuts, uncut, obstacle = leaves_and_cuts(arrivals)
    apart = settle(cuts, arrivals, ends)
    now = [leaf for leaf in leaves if leaf not in apart and leaf not in ends]
    # A hook would run twice: when the gradient is computed, and when it is added.
    hooked = (leaf for leaf in now if has_tensor_hooks(leaf.variable))
    return Division(arrivals, now, cuts, uncut, obstacle or next(hooked, None))


def split(division: Division, entries: Iterable[Entry]) -> SplitBackward | None:
    """Prepare a backward in two parts; return None if it must be one."""
    if division.is_whole:
        return None
    return SplitBackward([*entries], division.now, division.cuts)


class GraphParts(NamedTuple):
    """The parts of a `Division` before its cuts are settled."""

    leaves: list[Any]
    cuts: dict[Node, Cut]
    uncut: dict[Node, str]
    obstacle: Node | None = None


def leaves_and_cuts(nodes: Iterable[Node]) -> GraphParts:
    """Find the leaves among the nodes of a graph, and the operators that can be cut."""
    leaves: list[Any] = []
    cuts: dict[Node, Cut] = {}
    uncut: dict[Node, str] = {}
    runs_functions = False
    # 1. Sort the nodes: leaves, operators that can be cut, operators that cannot.
    for node in nodes:
        name = node.name()
        if name == LEAF:
            leaves.append(node)
        elif name in OPERATORS:
            cut = cut_of(node, name)
            if isinstance(cut, str):
                uncut[node] = cut
            else:
                cuts[node] = cut
        elif isinstance(node, BackwardCFunction):
            if name == CHECKPOINT:
                return GraphParts(leaves, {}, {}, node)
            runs_functions = True

    # 2. Give up whole cuts near a user's function.
    if runs_functions:
        # A function may change a gradient in place.  Only the hook of a node that runs sees the
        # gradient before that; a cut without other gradients does not run its node.
        why = "is near a torch.autograd.Function, which may change its gradient"
        uncut |= {node: why for node, cut in cuts.items() if cut.is_whole}
        cuts = {node: cut for node, cut in cuts.items() if not cut.is_whole}
    return GraphParts(leaves, cuts, uncut)


def arrivals_of(starts: Sequence[Node]) -> dict[Node, int]:
    """Count the edges that lead to each node of a graph; a start has one from outside.

    The graph alone decides the order of the nodes: hooks of parameters may send messages.
    """
    counts, waiting = dict.fromkeys(starts, 1), list(dict.fromkeys(starts))
    while waiting:
        for after, _ in waiting.pop().next_functions:
            if after is None:
                continue
            if after in counts:
                counts[after] += 1
            else:
                counts[after] = 1
                waiting.append(after)
    return counts


def settle(
    cuts: dict[Node, Cut], arrivals: Mapping[Node, int], ends: set[Any]
) -> Mapping[Node, object]:
    """Give up cuts until the two parts share no node; return the nodes of the weight backward.

    two gradients meet in a leaf     a + b = b + a                  keep both cuts
    three                            (a + b) + c != a + (b + c)     give them up
    a node gets other edges too      both parts would need it       give it up
    """
    while True:
        apart = _passed_after(cuts)
        meeting = Counter(way[-1] for cut in cuts.values() for way in cut.ways)
        bad = {node for node, late in apart.items() if node in ends or arrivals[node] > len(late)}
        bad.update(leaf for leaf, number in meeting.items() if number > 2)
        given_up = [
            node for node, cut in cuts.items() if not all(bad.isdisjoint(way) for way in cut.ways)
        ]
        if not given_up:
            return apart
        for node in given_up:
            del cuts[node]


def _passed_after(cuts: Mapping[Node, Cut]) -> dict[Node, set[object]]:
    """Return the nodes behind cut edges, each with the edges that lead to it from there."""
    edges_to: dict[Node, set[object]] = {}
    for node, cut in cuts.items():
        for place, way in zip(cut.edges, cut.ways, strict=True):
            edge: object = (node, place)
            for passed in way:
                edges_to.setdefault(passed, set()).add(edge)
                edge = passed  # a passing node has one edge
    return edges_to


def _gradient_versions(parameters: Iterable[Tensor]) -> list[tuple[int, int]]:
    gradients = (p.grad for p in parameters)
    return [(id(g), 0 if g is None or _is_part(g) else version_of(g)) for g in gradients]


@contextmanager
def _adding_to_shared(leaves: Iterable[Any]) -> Iterator[list[Any]]:
    """Record additions to gradients that are parts of one buffer.

    Their versions tell nothing: other stages add to other parts, and all parts share a counter.
    """
    added: list[Any] = []
    parts = [leaf for leaf in leaves if (g := leaf.variable.grad) is not None and _is_part(g)]
    handles = [leaf.register_hook(lambda *_: added.append(None)) for leaf in parts]
    try:
        yield added
    finally:
        for handle in handles:
            handle.remove()


def _is_part(gradient: Tensor) -> bool:
    if gradient.layout is not torch.strided:
        return False
    return gradient.untyped_storage().nbytes() > gradient.numel() * gradient.element_size()


def _grouped(cuts: Iterable[Cut]) -> list[list[Cut]]:
    """Group cuts whose gradients meet in a leaf: the leaf must get one sum."""
    # `groups` maps each leaf to its group; a cut that meets several groups joins them.
    groups: dict[Node, list[Cut]] = {}
    for cut in cuts:
        joined = [cut]
        for group in {id(g): g for way in cut.ways if (g := groups.get(way[-1]))}.values():
            joined += group
        groups.update((way[-1], joined) for member in joined for way in member.ways)
    return list({id(group): group for group in groups.values()}.values())
