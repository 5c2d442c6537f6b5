"""The table of operators: the letters of each one's dimensions, in the notation of `letters`.

Odd operators have a function that returns a rule.
"""

from collections.abc import Callable

from penstock.costs.counting.opaque_modules import OPAQUE

from . import odd_operators as odd
from .letters import WHOLE, Rule, Seen, base_name, read

TABLE: dict[str, str | Callable[[Seen], Rule | None]] = {
    # element by element
    "gelu relu silu tanh sigmoid exp log sqrt rsqrt pow abs where lt gt le ge": odd.elementwise,
    "clamp square softplus erf masked_fill float long bool half bfloat16 double": odd.elementwise,
    "eq ne int short exp2 log2 and or xor invert isinf isnan isfinite nan_to_num": odd.elementwise,
    "rsub rpow floordiv floor_divide mod remainder fmod made_like hardtanh relu6": odd.elementwise,
    "leaky_relu elu selu celu hardswish hardsigmoid mish logsigmoid softsign": odd.elementwise,
    "threshold maximum minimum sign sin cos log1p expm1 reciprocal floor ceil": odd.elementwise,
    "round logical_and logical_or logical_not": odd.elementwise,
    "add sub mul div": odd.arithmetic,
    "neg contiguous clone dropout detach positive": "* => *",
    "to type_as type": "* -> * | *, _ -> *",
    "new_zeros new_ones new_full new_empty": odd.made,
    # products
    "linear": "input:*k, weight:nk, +bias:n -> *n | input:*k, weight:k -> *",
    "matmul mm bmm mv dot": "~yk, ~kn -> ~yn | ~yk, k -> ~y | k, ~kn -> ~n | k, k -> ",
    "addmm baddbmm addmv": "+~yn, ~yk, ~kn -> ~yn | +y, yk, k -> y",
    "einsum": odd.einsum,
    "scaled_dot_product_attention": odd.attention,
    # along a dimension
    "softmax log_softmax cumprod argsort sort": "input:<.>, dim=-1 -> <.>",
    "cumsum": "input:<.>, dim=-1 => <.>",
    "topk": "input:<.>, k:, dim=-1 -> <.>",
    "kthvalue": "input:<.>, k:, dim=-1 -> <.> | input:<.>, k:, dim=-1 -> <>",
    "normalize": "input:<.>, p:, dim=1 -> <.>",
    "narrow": "input:<.>, dim=0 => <.>",
    "cat concat concatenate": "tensors:<.>, dim=0 => <.>",
    "chunk split tensor_split split_with_sizes": "input:<.>, sizes:, dim=0 => <.>",
    "sum mean amax amin var std logsumexp prod all any": odd.reduced,
    "argmax argmin max min count_nonzero median": odd.reduced,
    "layer_norm rms_norm": odd.norm,
    # shapes
    "T t": "ab => ba",
    "mT": "~ab => ~ba",
    "transpose permute": odd.permuted,
    "stack": "tensors:<>, dim=0 => <.>",
    "unsqueeze": "input:<>, dim= => <.>",
    "unbind": "input:<.>, dim=0 => <>",
    "select": "input:<.>, dim= => <>",
    "squeeze": "input:<.>, dim= => <> | input:<.>, dim= => <.>",
    "view reshape flatten unflatten": odd.view,
    "expand broadcast_to": "~ => ~",
    "expand_as": "~, ~ -> ~",
    "repeat": odd.repeat,
    "repeat_interleave": "input:*, repeats:, dim= => *",
    "tril triu": "*.. => *..",
    "pad": odd.pad,
    # indices: devices look up rows of a vocabulary v, zeros for other words
    "one_hot": "* -> *.",
    "embedding": odd.embedding,
    "cross_entropy nll_loss": odd.loss,
    "gather": "input:<.>, dim=, index:<y> -> <y>",
    "scatter scatter_add": "input:<.>, dim=, index:<.>, src:<.> -> <.>",
    "index_select": "input:<.>, dim=, index:y -> <y>",
    "index_add index_copy": "input:<.>, dim=, index:., source:<.> -> <.>",
    "getitem": odd.getitem,
    # vision: dimensions over which a window moves are whole
    "conv#d conv_transpose#d": odd.convolution,
    "max_pool#d max_pool#d_with_indices lp_pool#d": "*# -> *#",
    "adaptive_max_pool#d adaptive_max_pool#d_with_indices": "*# -> *#",
    "avg_pool#d adaptive_avg_pool#d": "*# => *#",
    "interpolate": "ab_ => ab_",
    "group_norm": odd.group_norm,
    # running statistics are whole at rest: a kernel takes the statistics of all devices' samples,
    # and writes all of them on each device
    "batch_norm": "input:ab*, running_mean:., running_var:., weight:b, bias:b -> ab*",
    # with running statistics, which are means over samples, the call runs replicated
    "instance_norm": "input:ab_, running_mean:, running_var:, weight:b, bias:b -> ab_",
}
"""By names of operators; # is 1, 2 or 3, and in a notation that number of whole dimensions."""
_BY_NAME = {
    name.replace("#", str(n)): row.replace("#", WHOLE * n) if isinstance(row, str) else row
    for names, row in TABLE.items()
    for name in names.split()
    for n in (1, 2, 3)
}


def find(seen: Seen) -> Rule | None:
    """Return the rule of a call; None without one, or if a tensor is given twice."""
    if len(seen.call.uses) > len(seen.takes):
        return None
    opaque = OPAQUE.get(seen.call.function)
    if opaque is not None:
        return Rule(takes=opaque.letters, gives=(opaque.gives,))
    row = _BY_NAME.get(base_name(seen.call.function))
    if row is None:
        return None
    return read(seen, row) if isinstance(row, str) else row(seen)
