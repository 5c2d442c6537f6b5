"""Split one backward in two: the gradients of a stage's inputs first, those of its weights later.

    roots ──► linear ──► gelu ──► linear ──► norm ──► entries     input backward: autograd runs
                ╎                   ╎          └────► its weight  once, all but the cut edges
                ╎ cut               ╎ cut
                ▼                   ▼
              weight              weight                          weight backward: from the
                                                                  operator's input and the
                                                                  gradient of its result

The edges from heavy operators to their weights are cut.  What is not cut is computed by the input
backward, and kept: parameters change their `.grad` in the weight backward only.
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
"""The node of a checkpoint with use_reentrant=True, which runs a backward of its own."""


@dataclass(frozen=True, slots=True)
class Division:
    """Which gradients of a graph wait for the weight backward: those behind its `cuts`.

    `arrivals` has all nodes; `now` are the leaves whose gradients the input backward computes.
    Operators that could be cut by their name, and are not, stand in `uncut` with the reason.
    `obstacle` is the node, if there is one, because of which no gradient waits.
    """

    arrivals: Mapping[Node, int]
    now: Sequence[Any]
    cuts: Mapping[Node, Cut]
    uncut: Mapping[Node, str]
    obstacle: Any

    @property
    def is_whole(self) -> bool:
        """Whether no gradient waits."""
        return self.obstacle is not None or not self.cuts


class SplitBackward:
    """The backward of one graph in two parts, `run_input` and `run_weights`."""

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
        """The tensors between the two parts; of a sparse gradient there is no memory to see."""
        gradients = [gradient for _, gradient in self._kept]
        cuts = [cut for group in self._groups for cut in group]
        found = [*gradients, *(tensor for cut in cuts for tensor, _ in cut.needs)]
        return [tensor for tensor in found if tensor.layout is torch.strided]

    def run_input(self, roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Run autograd once, and free the graph; entries catch their gradients.

        Raises:
            StateError: a function's own backward has added to a parameter's `.grad`.
        """
        entries, leaves, cuts = self._entries, self._leaves, self._cuts
        ends: list[Any] = [way[-1] for cut in cuts.values() for way in cut.ways]
        parameters = [leaf.variable for leaf in (*leaves, *ends)]
        before = _gradient_versions(parameters)
        nodes = [*(entry.node for entry in entries), *leaves, *cuts]
        targets = [GradientEdge(node, 0) for node in nodes]
        with _adding_to_shared([*leaves, *ends]) as added:
            found = iter(torch.autograd.grad(roots, targets, gradients, allow_unused=True))
        if added or _gradient_versions(parameters) != before:
            raise StateError(
                "the backward of a torch.autograd.Function has added to the .grad of a parameter "
                "by a backward of its own, which is too early where weights have a backward of "
                "their own. Zero the gradients; return the gradient instead (for a checkpoint: "
                "use_reentrant=False), or use a schedule whose backward is in one part"
            )
        for entry in entries:
            entry.caught.append(next(found))
        kept = zip(targets[len(entries) :], (next(found) for _ in leaves), strict=False)
        self._kept = [(edge, gradient) for edge, gradient in kept if gradient is not None]
        for cut, gradient in zip(cuts.values(), found, strict=True):
            if not cut.caught:  # the node did not have to run, and so called no hook
                cut.catch([gradient])
        self._groups = _grouped(cut for cut in cuts.values() if cut.caught[0] is not None)
        self._entries, self._leaves, self._cuts = [], [], {}

    def run_weights(self) -> None:
        """Add the gradients to the parameters.

        As many are computed at a time as need no more memory than frees what they are computed
        from; and together those of parameters whose gradients meet in a leaf, for one sum.
        """
        edges = [edge for edge, _ in self._kept]
        gradients = [gradient for _, gradient in self._kept]
        self._kept, more = [], 0
        with torch.no_grad(), without_torch_function():
            while self._groups:
                for cut in self._groups.pop(0):
                    found, added = cut.compute()
                    edges += cut.edges.values()
                    gradients += found
                    more += added
                if more > 0:
                    _add(edges, gradients)
                    edges, gradients, more = [], [], 0
            _add(edges, gradients)


def _add(edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Let autograd add gradients, without first checking each: that takes longer than to add a
    small one, and each is of the shape that its edge wants.
    """
    if edges:
        options = {"allow_unreachable": True, "accumulate_grad": True}
        run_engine(tuple(edges), tuple(gradients), False, False, (), **options)


def divide(roots: Sequence[Tensor], ends: set[Any]) -> Division:
    """Decide which gradients of weights wait; those of the nodes `ends` never do."""
    arrivals = arrivals_of([get_gradient_edge(root).node for root in roots])
    leaves, cuts, uncut, obstacle = leaves_and_cuts(arrivals)
    apart = settle(cuts, arrivals, ends)
    now = [leaf for leaf in leaves if leaf not in apart and leaf not in ends]
    # hooks would be called both when a gradient is found and when it is added
    hooked = (leaf for leaf in now if has_tensor_hooks(leaf.variable))
    return Division(arrivals, now, cuts, uncut, obstacle or next(hooked, None))


def split(division: Division, entries: Iterable[Entry]) -> SplitBackward | None:
    """Prepare a backward to be run in two parts; None where it has to be one."""
    if division.is_whole:
        return None
    return SplitBackward([*entries], division.now, division.cuts)


class Found(NamedTuple):
    """The parts of a `Division` before its cuts are settled."""

    leaves: list[Any]
    cuts: dict[Node, Cut]
    uncut: dict[Node, str]
    obstacle: Node | None = None


def leaves_and_cuts(nodes: Iterable[Node]) -> Found:
    """Find the leaves among the nodes of a graph, and the operators that can be cut."""
    leaves: list[Any] = []
    cuts: dict[Node, Cut] = {}
    uncut: dict[Node, str] = {}
    runs_functions = False
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
                return Found(leaves, {}, {}, node)
            runs_functions = True
    if runs_functions:
        # A function may change a gradient in place, and only the hook of a node that runs knows
        # what it was when it came.
        why = "is near a torch.autograd.Function, which may change its gradient"
        uncut |= {node: why for node, cut in cuts.items() if cut.is_whole}
        cuts = {node: cut for node, cut in cuts.items() if not cut.is_whole}
    return Found(leaves, cuts, uncut)


def arrivals_of(starts: Sequence[Node]) -> dict[Node, int]:
    """Count the edges that lead to each node of a graph; a start has one from outside.

    The nodes are in an order that only the graph decides: hooks of parameters may send.
    """
    found, waiting = dict.fromkeys(starts, 1), list(dict.fromkeys(starts))
    while waiting:
        for after, _ in waiting.pop().next_functions:
            if after is None:
                continue
            if after in found:
                found[after] += 1
            else:
                found[after] = 1
                waiting.append(after)
    return found


def settle(
    cuts: dict[Node, Cut], arrivals: Mapping[Node, int], ends: set[Any]
) -> Mapping[Node, object]:
    """Give up cuts until the two parts share no node; return those of the weight backward.

    Two gradients have the same sum in either order.  Three would be added in the order in which
    the engine finds them, so these are not cut.
    """
    while True:
        apart = _passed_after(cuts)
        meeting = Counter(way[-1] for cut in cuts.values() for way in cut.ways)
        bad = {node for node, own in apart.items() if node in ends or arrivals[node] > len(own)}
        bad.update(leaf for leaf, number in meeting.items() if number > 2)
        given_up = [
            node for node, cut in cuts.items() if not all(bad.isdisjoint(way) for way in cut.ways)
        ]
        if not given_up:
            return apart
        for node in given_up:
            del cuts[node]


def _passed_after(cuts: Mapping[Node, Cut]) -> dict[Node, set[object]]:
    """Collect the nodes behind cut edges, each with the edges by which these lead to it."""
    found: dict[Node, set[object]] = {}
    for node, cut in cuts.items():
        for place, way in zip(cut.edges, cut.ways, strict=True):
            edge: object = (node, place)
            for passed in way:
                found.setdefault(passed, set()).add(edge)
                edge = passed  # which has one edge
    return found


def _gradient_versions(parameters: Iterable[Tensor]) -> list[tuple[int, int]]:
    every = (p.grad for p in parameters)
    return [(id(g), 0 if g is None or _is_part(g) else version_of(g)) for g in every]


@contextmanager
def _adding_to_shared(leaves: Iterable[Any]) -> Iterator[list[Any]]:
    """Note when a gradient is added to one that is a part of a buffer: other stages add to the
    rest of it meanwhile, and all parts count their changes together.
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
    """Put those together whose gradients meet in a leaf: it is to see one sum."""
    groups: dict[Node, list[Cut]] = {}
    for cut in cuts:
        joined = [cut]
        for group in {id(g): g for way in cut.ways if (g := groups.get(way[-1]))}.values():
            joined += group
        groups.update((way[-1], joined) for member in joined for way in member.ways)
    return list({id(group): group for group in groups.values()}.values())
