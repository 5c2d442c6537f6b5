"""Which calls of a layer are divided, and what of them is seen outside it."""

from collections import Counter
from collections.abc import Sequence

from penstock.costs.graph import Call, Graph

from .in_place import may_change


def routed_calls(graph: Graph, layer: int) -> list[Call]:
    """Return the calls inside a layer's own call that work on what it is given or on its weights.

    All others make what they make of nothing, of buffers, or of tensors that the layer comes by in
    another way than by its arguments (a cache has made one), on each device alike.
    """
    found: list[Call] = []
    free: set[int] = set()
    made: set[int] = set()
    entering = graph.entering.get(layer)
    for call in graph.of_layer(layer):
        if call.is_between:
            continue
        specs = ((n, graph.tensors[n]) for n in call.takes)
        for n, spec in specs:
            is_aside = not (entering is None or spec.name or n in entering or n in made)
            if is_aside or (spec.name and not spec.wants_gradient):
                free.add(n)
        made.update(call.gives)
        if call.function and set(call.takes) - free:
            found.append(call)
        else:
            free.update(call.gives)
    return found


def own_weights(graph: Graph, calls: Sequence[Call]) -> list[int]:
    """Return the parameters that these calls use, and no other ones."""
    uses = Counter(n for call in calls for n in call.takes)
    own = (n for n, count in uses.items() if count == graph.num_uses[n])
    return [n for n in own if graph.tensors[n].name and graph.tensors[n].wants_gradient]


def used_outside(graph: Graph, calls: Sequence[Call]) -> set[int]:
    """Return what these calls make that others use, or the model gives."""
    uses, outputs = Counter(n for call in calls for n in call.takes), {*graph.outputs}
    made = {n for call in calls for n in call.gives}
    return {n for n in made if n in outputs or uses[n] < graph.num_uses[n]}


def why_whole(graph: Graph, layer: int) -> str:
    """Say why a layer is better done by all devices alike; "" if it may be divided.

    What is changed in place may be seen through another view of it, of which a device may hold
    another part.
    """
    routed = {id(call) for call in routed_calls(graph, layer)}
    for call in graph.of_layer(layer):
        if call.is_between:
            continue
        if call.changes and id(call) in routed and not may_change(graph, call):
            return f"{call.function} changes a tensor in place"
        if not call.function:
            return "code that no function of torch shows"
    return ""


def whole_bytes(graph: Graph, calls: Sequence[Call]) -> float:
    """Return the bytes that calls save on a device that does all of them."""
    saved = {n for call in calls for n in call.saved}
    own = (graph.tensors[n] for n in saved)
    whole = sum(x.num_bytes for x in own if not (x.name and x.wants_gradient))
    return whole + sum(call.inner_bytes for call in calls)
