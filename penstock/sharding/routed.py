"""Find the calls of a layer that may be divided, and the values that leave them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod

from penstock.costs.counting.graph import Call, Graph
from penstock.costs.records import Part

from .layouts import Layout, S, Shape, State
from .letters import base_name
from .rules import fits


def routed_calls(graph: Graph, layer: int) -> list[Call]:
    """Return the calls inside a layer's own call that work on its arguments or weights.

    All others run replicated.  They work on nothing, on buffers, or on tensors that the layer gets
    by another way than its arguments, such as from a cache.
    """
    routed: list[Call] = []
    free: set[int] = set()  # tensors that are the same on each device, in any case
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
            routed.append(call)
        else:
            free.update(call.gives)
    return routed


def own_weights(graph: Graph, calls: Sequence[Call]) -> list[int]:
    """Return the parameters that only these calls use."""
    uses = Counter(n for call in calls for n in call.takes)
    inner = (n for n, count in uses.items() if count == graph.num_uses[n])
    return [n for n in inner if graph.tensors[n].name and graph.tensors[n].wants_gradient]


def used_outside(graph: Graph, calls: Sequence[Call]) -> set[int]:
    """Return results of these calls that other calls use, or that the model returns."""
    uses, outputs = Counter(n for call in calls for n in call.takes), {*graph.outputs}
    made = {n for call in calls for n in call.gives}
    return {n for n in made if n in outputs or uses[n] < graph.num_uses[n]}


def between(
    graph: Graph, maker: Sequence[Call], user: Sequence[Call] | None, *, is_end: bool = False
) -> list[int]:
    """Return the tensors that calls of one layer make and only those of the next one use.

    Outputs of the model are among them only at its end: the `user` is the code after the last
    layer, or None for a loss whose calls are unknown.
    """
    calls, outputs = [*maker, *(user or ())], {*graph.outputs}
    made = {n for call in maker for n in call.gives}
    used = Counter(n for call in calls for n in call.takes)
    taken = outputs if user is None else {n for call in user for n in call.takes}
    taken = taken if is_end else taken - outputs
    return sorted(n for n in made & taken if used[n] == graph.num_uses[n])


def with_end(graph: Graph, num_layers: int) -> Graph:
    """Return the graph with the code after the last layer, or the loss, as a layer of its own.

    There is none if no such call uses a result of the last layer.  Outputs that are no scalars do
    not count as used: a step takes the loss, and leaves others in slices.
    """
    last = graph.of_layer(num_layers - 1)
    own = [n for n, call in enumerate(last) if not call.is_between]
    made = {n for k in own for n in last[k].gives}
    after = {id(call): call for call in last[max(own, default=-1) + 1 :]}
    uses = any(n in made for call in after.values() for n in call.takes)
    if not uses or graph.of_layer(num_layers):
        return graph
    calls = (
        replace(call, layer=num_layers, is_between=False) if id(call) in after else call
        for call in graph.calls
    )
    scalars = tuple(n for n in graph.outputs if not graph.tensors[n].shape)
    return replace(graph, calls=tuple(calls), outputs=scalars)


def for_loss(
    shapes: Sequence[Shape], allowed: Sequence[Layout], mesh: Sequence[int]
) -> list[Layout]:
    """Return the layouts in which a model may leave its outputs for the loss.

    They are those `allowed` between layers, and slices of the last dimension, a vocabulary, along
    all axes or all but the first.  An output without values for some device stays whole.
    """
    if not shapes or not all(shapes) or prod(mesh) == 1:
        return []
    words: State = S(min(map(len, shapes)) - 1)
    more = [(layout[0], *(words,) * (len(mesh) - 1)) for layout in allowed]
    layouts = dict.fromkeys([*allowed, *more, (words,) * len(mesh)])
    return [own for own in layouts if all(fits(shape, own, tuple(mesh)) for shape in shapes)]


def why_whole(graph: Graph, layer: int) -> str:
    """Return the reason why a layer runs replicated; "" if it may be divided.

    A tensor that is changed in place may have a view of which a device holds another part.
    """
    routed = {id(call) for call in routed_calls(graph, layer)}
    for call in graph.of_layer(layer):
        if call.is_between:
            continue
        if call.changes and id(call) in routed and not _may_change(graph, call):
            return f"{call.function} changes a tensor in place"
        if not call.function:
            return "code that no function of torch shows"
    return ""


_NEW_MEMORY = {
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm", "linear", "addmm"),
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
    *("matmul", "bmm", "add", "sub", "mul", "div", "cat", "stack", "softmax", "embedding"),
    *("clone", "sum", "topk"),
    *("relu", "relu6", "hardtanh", "leaky_relu", "elu", "silu", "gelu", "sigmoid", "tanh"),
    *("hardswish", "hardsigmoid", "mean", "amax"),
}
"""Functions whose results share no memory with an argument, unless they change it in place."""


def _may_change(graph: Graph, call: Call) -> bool:
    """Tell if a call that changes a tensor in place may be divided: nothing shares its memory.

    y = norm(x)     new memory          the result of relu_ replaces y, whose parts it may
    y.relu_()       changes it          divide in another way
    z = y.view(-1)  a view of it        a device may hold other parts of z than of y:
    y.add_(1)       changes both        the layer is not divided
    """
    if len(call.changes) != 1 or len(call.gives) != 1:
        return False
    (changed,) = call.changes
    maker = graph.tensors[changed].maker
    if maker is None:
        return False
    made = graph.calls[maker]
    others = [other for other in graph.calls if changed in other.takes and other is not call]
    if any(base_name(other.function) not in _NEW_MEMORY for other in (made, *others)):
        return False
    is_own = made.layer == call.layer and not made.is_between
    return is_own and (not made.changes or _may_change(graph, made))


def whole_bytes(graph: Graph, calls: Sequence[Call]) -> float:
    """Return the bytes that calls save where they run replicated."""
    saved = {n for call in calls for n in call.saved}
    specs = (graph.tensors[n] for n in saved)
    whole = sum(x.num_bytes for x in specs if not (x.name and x.wants_gradient))
    return whole + sum(call.inner_bytes for call in calls)


def num_operators(calls: Sequence[Call]) -> tuple[int, int, int]:
    """Return the operators of calls' forwards and backwards, and the number of calls."""
    both = [0, 0]
    for operator in (own for call in calls for own in call.operators):
        both[operator.part is not Part.FORWARD] += operator.count
    return both[0], both[1], len(calls)
