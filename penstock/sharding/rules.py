"""Rules: the ways to divide the calls of torch's functions along one axis of a mesh.

A rule names the dimensions of the arguments and results of a call by letters, as an einsum does:

    linear    "abk,nk,n->abn"    cut along b:  S(1), R, R    -> S(1)
                                 cut along n:  R, S(0), S(0) -> S(2)    by columns
                                 cut along k:  S(2), S(1), P -> P       by rows: one adds the bias

One letter is cut at a time.  A tensor that has the letter is a shard.  An argument that lacks it
is whole on each device, and its gradient is a partial sum.  A result without it is a partial sum.
Every call can also run replicated.  A function without a rule runs only so; the plan names it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from penstock.costs.counting.opaque_modules import OPAQUE

from . import odd_operators as odd
from .layouts import I, Layout, P, R, S, Shape, State
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
"""Rules by names of operators, in the notation of `letters` or as a function.  # is 1, 2 or 3, and
in a notation that number of whole dimensions."""
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


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to divide a call along an axis: a state for each argument and result."""

    takes: tuple[State, ...]
    gives: tuple[State, ...]
    cut: str = ""
    """The letter that is cut; "" where the call is replicated."""
    piece: int = 1
    """Slices of the first tensor with the letter are multiples of this length."""
    is_skewed: bool = False
    """True where the last of n slices has 2 - 1/n times as much work as an equal share."""


ALIKE = Choice((), ())
"""The choice of a call that is in no plan: it runs replicated."""


@lru_cache(maxsize=1 << 14)
def choices(seen: Seen, count: int) -> tuple[Choice, ...]:
    """Return all ways to divide a call among `count` devices, the replicated ones first."""
    num_takes, num_gives = len(seen.takes), len(seen.gives)
    options = [Choice((state,) * num_takes, (state,) * num_gives) for state in (I, R)]
    letters = find(seen)
    if letters is None:
        return tuple(options)
    if letters.is_linear and num_takes:
        options.append(Choice((P,) * num_takes, (P,) * num_gives))
    names = dict.fromkeys("".join((*letters.takes, *letters.gives)).replace(WHOLE, ""))
    options += [_cut(letters, name) for name in names]
    return tuple(choice for choice in options if _is_enough(seen, (choice,), (count,)))


def _cut(letters: Rule, name: str) -> Choice:
    gives = tuple(S(result.index(name)) if name in result else P for result in letters.gives)
    takes: list[State] = [S(own.index(name)) if name in own else R for own in letters.takes]
    if letters.bias is not None and name not in letters.takes[letters.bias] and P in gives:
        takes[letters.bias] = P
    piece = dict(letters.pieces).get(name, 1)
    return Choice(tuple(takes), gives, name, piece, name in letters.skewed)


def divisions(seen: Seen, mesh: Sequence[int]) -> tuple[tuple[Choice, ...], ...]:
    """Return all ways to divide a call along each axis of a mesh."""
    return tuple(choices(seen, count) for count in mesh)


def together(
    seen: Seen, by_axis: Sequence[Sequence[Choice]], mesh: tuple[int, ...]
) -> list[tuple[Choice, ...]]:
    """Return all combinations of a choice per axis that leave each device something.

    Each choice alone does, so choices of unlike letters, which cut unlike dimensions, do together.
    """
    found = []
    for combined in product(*by_axis):
        cuts = [choice.cut for choice in combined if choice.cut]
        if len(set(cuts)) == len(cuts) or _is_enough(seen, combined, mesh):
            found.append(combined)
    return found


@lru_cache(maxsize=1 << 16)
def fits(shape: Shape, layout: Layout, mesh: tuple[int, ...]) -> bool:
    """Tell whether each device gets a part of a tensor; an empty tensor has to be whole."""
    return all(
        max(length, 1)
        >= prod(n for n, s in zip(mesh, layout, strict=True) if isinstance(s, S) and s.dim == d)
        for d, length in enumerate(shape)
    )


def _is_enough(seen: Seen, by_axis: Sequence[Choice], mesh: tuple[int, ...]) -> bool:
    """Tell whether each device gets at least one piece of each dimension that is cut."""
    layouts = zip(*((*choice.takes, *choice.gives) for choice in by_axis), strict=True)
    tensors = list(zip((*seen.takes, *seen.gives), layouts, strict=True))
    if not all(fits(shape, layout, mesh) for shape, layout in tensors):
        return False
    for axis, choice in enumerate(by_axis):
        # axes that cut the same letter divide its slices further
        parts = prod(n for n, other in zip(mesh, by_axis, strict=True) if other.cut == choice.cut)
        lengths = (shape[x.dim] for shape, layout in tensors if isinstance(x := layout[axis], S))
        if next(lengths, parts * choice.piece) < parts * choice.piece:
            return False
    return True
