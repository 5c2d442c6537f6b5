"""Explain which weight gradients a split backward cannot defer; count the memory of the others."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from penstock.model.stage_plan import Step
from penstock.planner.unsplit import Unsplit
from penstock.torch_private import node_number, results_of, storage_id

from .stage.notes import layer_at
from .stage.split_backward import CHECKPOINT, Division, arrivals_of, leaves_and_cuts, settle
from .stage.weight_gradients import LEAF, OPERATORS, PASSING

NumberedLayers = Sequence[tuple[int, nn.Module]]


def why_unsplit(
    layers: NumberedLayers, division: Division, marks: Sequence[tuple[int, Step]] = ()
) -> list[Unsplit]:
    """Return the layers whose weight gradients do not wait for the second part, with reasons.

    Biases and scales of norms are left out: their gradients are only sums.  `layers` are those of
    a stage, or one alone, by number; `marks` tell which layer made a node of the graph.
    """
    names = {
        id(parameter): (index, name)
        for index, module in reversed(layers)
        for name, parameter in module.named_parameters()
    }
    users = _users(division.arrivals)
    if division.obstacle is not None:
        return [_of_obstacle(division.obstacle, users, names, layers, marks)]

    # Group the weights by layer; name the reason of the largest that does not wait.
    now, weights = set(division.now), dict[int, dict[Any, int]]()
    for node in division.arrivals:
        leaf: Any = node
        if leaf.name() == LEAF and leaf.variable.dim() > 1 and id(leaf.variable) in names:
            index, _ = names[id(leaf.variable)]
            weights.setdefault(index, {})[leaf] = leaf.variable.numel()
    reasons = []
    for index, sizes in sorted(weights.items()):
        if unsplit := {leaf: size for leaf, size in sizes.items() if leaf in now}:
            share = sum(unsplit.values()) / sum(sizes.values())
            reason = _reason(max(unsplit, key=unsplit.__getitem__), division, users)
            reasons.append(Unsplit(index, f"{share:.0%} of its weights: {reason}"))
    return reasons


def why_stage_unsplit(
    layers: NumberedLayers, division: Division, marks: Sequence[tuple[int, Step]]
) -> list[Unsplit]:
    """Return the reasons for a stage; also report a stage whose gradients are only sums."""
    reasons = why_unsplit(layers, division, marks)
    if not reasons and division.is_whole and division.now:
        reasons.append(Unsplit(layers[0][0], "nothing in the stage can be cut", whole=True))
    return reasons


def merged_reasons(stages: Iterable[Sequence[Sequence[Unsplit]]]) -> tuple[Unsplit, ...]:
    """Merge the reasons from all backwards of the stages."""
    merged = []
    for backwards in stages:
        times = Counter(unsplit for backward in backwards for unsplit in dict.fromkeys(backward))
        for unsplit, number in times.items():
            some = f", in {number} of {len(backwards)} backwards"
            is_always = number == len(backwards)
            merged.append(unsplit if is_always else replace(unsplit, reason=unsplit.reason + some))
    return tuple(sorted(dict.fromkeys(merged), key=lambda one: (one.layer, one.reason)))


def left_bytes(module: nn.Module, results: Sequence[Tensor]) -> int:
    """Return the bytes that the first part of a layer's backward keeps for the second, at most.

    They are the inputs of operators that wait, the gradients of their results, and the gradients
    of all other weights.
    """
    arrivals = arrivals_of([get_gradient_edge(t).node for t in results if t.requires_grad])
    # The inputs of the layer are leaves too; a stage's backward never defers their gradients.
    leaves, cuts, *_ = leaves_and_cuts(arrivals)
    parameters = {id(parameter) for parameter in module.parameters()}
    inputs = {leaf for leaf in leaves if id(leaf.variable) not in parameters}
    apart = settle(cuts, arrivals, inputs)
    lasting = {storage_id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    reads = [tensor for cut in cuts.values() for tensor, _ in cut.reads]
    bytes_of = {storage_id(t): t.untyped_storage().nbytes() for t in reads}
    of_reads = sum(bytes_of[storage] for storage in bytes_of.keys() - lasting)
    of_results: int = sum(
        prod(r.shape) * r.dtype.itemsize for node in cuts for r in results_of(node)[:1]
    )
    late = {*apart, *inputs}
    now: list[Tensor] = [leaf.variable for leaf in leaves if leaf not in late]
    return of_reads + of_results + sum(p.numel() * p.element_size() for p in now)


_Users = Mapping[Node, Sequence[Node]]
"""The nodes whose edges lead to each node; a node with two such edges stands twice."""


def _users(nodes: Iterable[Node]) -> _Users:
    users: dict[Node, list[Node]] = {}
    for node in nodes:
        for after, _ in node.next_functions:
            if after is not None:
                users.setdefault(after, []).append(node)
    return users


def _operators(leaf: Node, users: _Users) -> Iterator[Node]:
    """Yield the operators that use a leaf, directly or through nodes that pass gradients on."""
    for node in users.get(leaf, ()):
        if node.name() in PASSING:
            yield from _operators(node, users)
        else:
            yield node


def _of_obstacle(
    node: Any,
    users: _Users,
    names: Mapping[int, tuple[int, str]],
    layers: NumberedLayers,
    marks: Sequence[tuple[int, Step]],
) -> Unsplit:
    """Return the layer and the reason that make a stage's backward whole."""
    if node.name() == CHECKPOINT:
        reason = "a checkpoint with use_reentrant=True runs a backward of its own"
        return Unsplit(_layer_of(node, layers, marks), reason, whole=True)
    reason = "has a hook on its gradient, and is no weight that can wait"
    if (named := names.get(id(node.variable))) is not None:
        return Unsplit(named[0], f"{named[1]} {reason}", whole=True)
    layer = _layer_of(users[node][0], layers, marks)
    return Unsplit(layer, f"a tensor that is no parameter {reason}", whole=True)


def _layer_of(node: Node, layers: NumberedLayers, marks: Sequence[tuple[int, Step]]) -> int:
    """Return the number of the layer that made a node; the first layer if it is unknown."""
    step = layer_at(node_number(node) or 0, marks)
    return layers[0][0] if step is None else step.index


def _reason(leaf: Any, division: Division, users: _Users) -> str:
    operators = list(_operators(leaf, users))
    if len(operators) > 2:
        return f"one is used {len(operators)} times"
    reasons = set()
    for node in operators:
        if node not in division.cuts:
            kind = node.name().removesuffix("0").removesuffix("Backward")
            given_up = "leads to another gradient that cannot wait"
            why = given_up if node.name() in OPERATORS else "cannot be cut"
            reasons.add(f"{kind} {division.uncut.get(node, why)}")
    return " and ".join(sorted(reasons)) or "nothing"
