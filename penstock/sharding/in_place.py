"""Whether a tensor that a layer changes in place is seen through the layer's own variable only.

y = norm(x)     new memory          each device may hold another part of y: what stands for
y.relu_()       changes it          it is given the part of the result instead
z = y.view(-1)  a view of it        of which a device may hold other parts than of y:
y.add_(1)       changes both        the layer is not divided
"""

from penstock.costs.graph import Call, Graph

from .rules import base_name

_NEW_MEMORY = {
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm", "linear", "addmm"),
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
    *(
        "matmul",
        "bmm",
        "add",
        "sub",
        "mul",
        "div",
        "cat",
        "stack",
        "softmax",
        "embedding",
        "clone",
        "sum",
        "topk",
    ),
    *("relu", "relu6", "hardtanh", "leaky_relu", "elu", "silu", "gelu", "sigmoid", "tanh"),
    *("hardswish", "hardsigmoid", "mean", "amax", "clone"),
}
"""Functions whose results share no memory with what they are given, unless they change it."""


def may_change(graph: Graph, call: Call) -> bool:
    """Tell whether a call that changes a tensor in place may be divided: nothing else in the layer
    shares memory with it.
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
    return is_own and (not made.changes or may_change(graph, made))
