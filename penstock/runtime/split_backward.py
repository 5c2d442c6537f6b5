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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from penstock.errors import StateError
from penstock.model.entries import Entry, version_of
from penstock.torch_private import has_tensor_hooks

from .weight_gradients import Cut, cut_of, is_leaf


class SplitBackward:
    """The backward of one graph in two parts, `run_input` and `run_weights`."""

    def __init__(
        self, entries: Sequence[Entry], leaves: Sequence[Any], cuts: Mapping[Node, Cut]
    ) -> None:
        self._entries, self._leaves, self._cuts = entries, leaves, cuts
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._groups: list[list[Cut]] = []
        for node, cut in cuts.items():
            node.register_prehook(cut.catch)

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
        found = iter(torch.autograd.grad(roots, targets, gradients, allow_unused=True))
        if _gradient_versions(parameters) != before:
            raise StateError(
                "the backward of a torch.autograd.Function has added to the .grad of a parameter "
                "by a backward of its own, which is too early where weights have a backward of "
                "their own. Zero the gradients; return the gradient instead (for a checkpoint: "
                "use_reentrant=False), or use a schedule whose backward is in one part"
            )
        for entry in entries:
            entry.caught.append(next(found))
        self._kept = [(leaf.variable, g) for leaf in leaves if (g := next(found)) is not None]
        for cut, gradient in zip(cuts.values(), found, strict=True):
            if not cut.caught:  # the node did not have to run, and so called no hook
                cut.catch([gradient])
        self._groups = _grouped(cut for cut in cuts.values() if cut.caught[0] is not None)
        self._entries, self._leaves, self._cuts = [], [], {}

    def run_weights(self) -> None:
        """Add the gradients to the parameters, and free them one group of parameters at a time."""
        kept, self._kept = self._kept, []
        if kept:
            torch.autograd.backward([leaf for leaf, _ in kept], [g for _, g in kept])
        del kept
        while self._groups:
            group = self._groups.pop(0)
            edges = [edge for cut in group for edge in cut.edges.values()]
            torch.autograd.backward(edges, [g for cut in group for g in cut.compute()])


def split(roots: Sequence[Tensor], entries: Iterable[Entry]) -> SplitBackward | None:
    """Prepare the backward from some roots to be run in two parts; None where it has to be one."""
    entries = [entry for entry in entries if entry.node is not None]
    starts = [get_gradient_edge(root).node for root in roots]
    reached = _reach(starts, {})
    if any(node.name() == "CheckpointFunctionBackward" for node in reached):
        return None  # with use_reentrant=True: it runs a backward of its own
    cuts = {node: cut for node in reached if (cut := cut_of(node)) is not None}
    if any(isinstance(node, BackwardCFunction) for node in reached):
        # A function may change a gradient in place, and only the hook of a node that runs knows
        # what it was when it came.
        cuts = {node: cut for node, cut in cuts.items() if not cut.is_whole}
    ends = {entry.node for entry in entries}
    running = _settle(cuts, starts, ends)
    leaves: list[Any] = [node for node in running if is_leaf(node) and node not in ends]
    if not cuts or any(has_tensor_hooks(leaf.variable) for leaf in leaves):
        return None  # hooks would be called both when a gradient is found and when it is added
    return SplitBackward(entries, leaves, cuts)


def _settle(cuts: dict[Node, Cut], starts: Sequence[Node], ends: set[Any]) -> dict[Node, None]:
    """Give up cuts until the two parts share no node; return what the input backward reaches.

    Two gradients have the same sum in either order.  Three would be added in the order in which
    the engine finds them, so these are not cut.
    """
    while True:
        running = _reach(starts, cuts)
        shared = running.keys() | ends
        arriving = Counter(way[-1] for cut in cuts.values() for way in cut.ways)
        bad = [
            node
            for node, cut in cuts.items()
            if any(arriving[way[-1]] > 2 or not shared.isdisjoint(way) for way in cut.ways)
        ]
        if not bad:
            return running
        for node in bad:
            del cuts[node]


def _reach(starts: Sequence[Node], cuts: Mapping[Node, Cut]) -> dict[Node, None]:
    """Find all nodes that a backward from `starts` comes to, if it leaves out the cut edges.

    They are in an order that only the graph decides: hooks of parameters may send.
    """
    seen, waiting = dict.fromkeys(starts), list(starts)
    while waiting:
        node = waiting.pop()
        barred = cuts[node].edges if node in cuts else ()
        for place, (after, _) in enumerate(node.next_functions):
            if after is not None and after not in seen and place not in barred:
                seen[after] = None
                waiting.append(after)
    return seen


def _gradient_versions(parameters: Iterable[Tensor]) -> list[tuple[int, int]]:
    found = [parameter.grad for parameter in parameters]
    return [(0, 0) if g is None else (id(g), version_of(g)) for g in found]


def _grouped(cuts: Iterable[Cut]) -> list[list[Cut]]:
    """Put those together whose gradients meet in a leaf: it is to see one sum."""
    groups: dict[Node, list[Cut]] = {}
    for cut in cuts:
        joined = [cut]
        for group in {id(g): g for way in cut.ways if (g := groups.get(way[-1]))}.values():
            joined += group
        groups.update((way[-1], joined) for member in joined for way in member.ways)
    return list({id(group): group for group in groups.values()}.values())
