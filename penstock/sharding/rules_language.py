"""Rules of products, of attention, of functions along a dimension and of changes of shape.

linear        "*k, nk, n -> *n"
matmul        "*yk, *kn -> *yn"     with broadcast dimensions before
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from math import prod

from .layouts import Shape
from .rules import (
    LETTERS,
    WHOLE,
    Rule,
    Seen,
    base_name,
    elementwise,
    ends,
    named,
    rule,
    spelled,
)

spelled("linear", "input *k, weight nk, +bias n -> *n")
spelled("tril triu", "input *.. -> *..", is_linear=True)


# -- element by element ---------------------------------------------------------------------------


@rule("new_zeros", "new_ones", "new_full", "new_empty")
def _made(seen: Seen) -> Rule | None:
    """Cut a new tensor as the one it is made beside, along dimensions of equal length."""
    (beside, *others), (result,) = seen.takes, seen.gives
    if others:
        return None
    names = zip(LETTERS, beside, result, strict=False)
    letters = "".join(x if own == new else WHOLE for x, own, new in names)
    takes, gives = (letters.ljust(len(shape), WHOLE) for shape in (beside, result))
    return Rule(takes=(takes,), gives=(gives,))


@rule("to", "type_as", "type", "layer_norm", "rms_norm")
def _of_first(seen: Seen) -> Rule:
    """Cut the first tensor only; a norm keeps whole the dimensions that it looks at together."""
    tensor, *others = seen.takes
    is_norm = base_name(seen.call.function).endswith("norm")
    normal = len(seen.argument(1, "normalized_shape")) if is_norm else 0
    letters = named(tensor, range(len(tensor) - normal, len(tensor)))
    return Rule(takes=(letters, *(WHOLE * len(shape) for shape in others)), gives=(letters,))


# -- products -------------------------------------------------------------------------------------


@rule("matmul", "mm", "bmm", "mv", "dot")
def _matmul(seen: Seen) -> Rule | None:
    return _product(seen.takes, seen.gives[0])


def _product(factors: Sequence[Shape], result: Shape) -> Rule | None:
    """Name rows y, columns n and the sum's dimension k; a vector has neither rows nor columns."""
    if len(factors) != 2:
        return None
    left, right = factors
    outer = "y" * (len(left) > 1) + "n" * (len(right) > 1)
    batch = result[: len(result) - len(outer)]
    letters = named(batch)
    takes = (
        ends(left[:-2], letters, batch) + "yk"[-min(2, len(left)) :],
        ends(right[:-2], letters, batch) + "kn"[: len(right)],
    )
    return Rule(takes=takes, gives=(letters + outer,))


@rule("addmm", "baddbmm", "addmv")
def _added_product(seen: Seen) -> Rule | None:
    """Treat the added tensor as a bias: one partial sum of a cut along k contains it."""
    added, *factors = seen.takes
    product = _product(factors, seen.gives[0])
    if product is None:
        return None
    takes = (ends(added, product.gives[0], seen.gives[0]), *product.takes)
    return Rule(takes=takes, gives=product.gives, bias=0)


@rule("einsum")
def _einsum(seen: Seen) -> Rule | None:
    """Take the letters of the equation; a diagonal is whole."""
    equation = seen.argument(0, "equation")
    if not isinstance(equation, str):
        return None
    arguments, _, result = (part.strip() for part in equation.replace(" ", "").partition("->"))
    parts = arguments.split(",")
    if len(parts) != len(seen.takes) or ("->" not in equation and "..." in equation):
        return None
    if "->" not in equation:
        result = "".join(sorted(x for x in {*arguments} - {","} if arguments.count(x) == 1))
    # letters for the dimensions of an ellipsis, aligned at its end as in a broadcast
    dots = "".join(x for x in LETTERS if x not in equation)
    most = max(len(x) - len(p.replace("...", "")) for x, p in zip(seen.takes, parts, strict=True))
    dots = dots[:most]
    takes = [_spelled(p, dots, len(x)) for p, x in zip(parts, seen.takes, strict=True)]
    # a dimension of length 1 that is broadcast is whole
    lengths: dict[str, int] = {}
    for letter, length in chain(*map(zip, takes, seen.takes)):
        lengths[letter] = max(length, lengths.get(letter, 0))
    diagonal = {x for part in takes for x in part if part.count(x) > 1}
    pairs = (zip(part, shape, strict=True) for part, shape in zip(takes, seen.takes, strict=True))
    names = tuple(
        "".join(WHOLE if x in diagonal or n != lengths[x] else x for x, n in part)
        for part in pairs
    )
    gives = _spelled(result, dots, len(seen.gives[0]))
    return Rule(takes=names, gives=("".join(WHOLE if x in diagonal else x for x in gives),))


def _spelled(part: str, dots: str, dims: int) -> str:
    """Put letters in the place of the dots of an equation."""
    count = dims - len(part.replace("...", ""))
    return part.replace("...", dots[len(dots) - count :])


# -- attention ------------------------------------------------------------------------------------


@rule("scaled_dot_product_attention")
def _attention(seen: Seen) -> Rule | None:
    """Cut sequences, heads, and the positions of queries, unless the mask is causal.

    Grouped heads are cut along the groups.
    """
    query, key, value, *masks = seen.takes
    result = seen.gives[0]
    batch = result[:-2]
    letters = named(batch)
    row = WHOLE if seen.argument(5, "is_causal", default=False) else "y"
    takes = [ends(query[:-2], letters, batch) + row + WHOLE]
    for shape in (key, value):
        batch_letters = ends(shape[:-2], letters, batch)
        if seen.argument(7, "enable_gqa", default=False) and shape[-3] > 1:
            batch_letters = batch_letters[:-1] + letters[-1]
        takes.append(batch_letters + WHOLE * 2)
    for mask in masks:
        takes.append(ends(mask, f"{letters}{row}{WHOLE}", (*query[:-1], key[-2])))
    return Rule(takes=tuple(takes), gives=(f"{letters}{row}{WHOLE}",))


# -- along a dimension ----------------------------------------------------------------------------

_JOINS = ("cat", "concat", "concatenate")
_SPLITS = ("chunk", "split", "tensor_split", "split_with_sizes")
_ALONG = {
    **dict.fromkeys(("cumsum", "cumprod", "softmax", "log_softmax", "argsort", "sort"), (1, -1)),
    **dict.fromkeys(("topk", "kthvalue"), (2, -1)),
    **dict.fromkeys(("narrow", *_JOINS), (1, 0)),
    **dict.fromkeys(_SPLITS, (2, 0)),
    "normalize": (2, 1),
}
"""The place of the argument `dim` of functions that work along a dimension, and its default."""
_LINEAR = ("cumsum", "narrow", *_JOINS, *_SPLITS)


@rule(*_ALONG)
def _along(seen: Seen) -> Rule | None:
    """Keep whole the dimension along which a function works; cut the others alike."""
    num_dims = len(seen.takes[0])
    place, default = _ALONG[base_name(seen.call.function)]
    dim = seen.dim(place, default)
    is_ragged = len({len(shape) for shape in seen.takes}) != 1  # `cat` leaves out empty ones
    if not isinstance(dim, int) or not num_dims or is_ragged:
        return None
    letters = named(seen.takes[0], [dim % num_dims])
    return Rule(
        takes=(letters,) * len(seen.takes),
        gives=(letters,) * len(seen.gives),
        is_linear=base_name(seen.call.function) in _LINEAR,
    )


_SUMS = ("sum", "mean")
"""Reductions that give partial sums of a dimension that is cut; a mean, too."""


@rule(
    *(*_SUMS, "amax", "amin", "var", "std", "logsumexp", "prod", "all", "any"),
    *("argmax", "argmin", "max", "min", "count_nonzero", "median"),
)
def _reduced(seen: Seen) -> Rule:
    """Reduce one tensor along some dimensions, or along all; `max` of two is elementwise."""
    if len(seen.takes) > 1:
        return elementwise(seen)
    dims = seen.dim(1)
    dims = None if isinstance(dims, bool) else dims  # of another argument of `var`
    dims = dims if isinstance(dims, tuple) else tuple(d for d in (dims,) if d is not None)
    shape = seen.takes[0]
    reduced = {d % len(shape) for d in dims or range(len(shape))} if shape else set[int]()
    is_sum = base_name(seen.call.function) in _SUMS
    gives = named(shape, reduced, WHOLE if len(seen.gives[0]) == len(shape) else "")
    return Rule(
        takes=(named(shape, () if is_sum else reduced),),
        gives=(gives,) * len(seen.gives),
        is_linear=is_sum,
    )


# -- shapes ---------------------------------------------------------------------------------------


@rule("transpose", "swapaxes", "permute", "T", "t", "mT")
def _permuted(seen: Seen) -> Rule | None:
    letters = named(seen.takes[0])
    order = list(range(len(letters)))
    match base_name(seen.call.function):
        case "permute":
            dims = seen.argument(1, "dims")
            order = [*(dims if isinstance(dims, tuple) else seen.call.arguments[1:])]
        case "transpose":
            one, other = seen.argument(1, "dim0"), seen.argument(2, "dim1")
            order[one], order[other] = order[other], order[one]
        case _ if len(order) == 2 or (len(order) > 2 and ".mT." in seen.call.function):
            order[-2:] = order[:-3:-1]
        case _:
            return None
    gives = "".join(letters[dim] for dim in order)
    return Rule(takes=(letters,), gives=(gives,), is_linear=True)


@rule("unsqueeze", "stack", "unbind")
def _one_dimension_more(seen: Seen) -> Rule:
    """One side of the call has a dimension that the other lacks; it is whole."""
    adds = base_name(seen.call.function) != "unbind"
    most = len(seen.takes[0]) + adds
    dim = seen.dim(1, 0) % most
    letters = LETTERS[: most - 1]
    longer = letters[:dim] + WHOLE + letters[dim:]
    takes, gives = (letters, longer) if adds else (longer, letters)
    return Rule(takes=(takes,) * len(seen.takes), gives=(gives,) * len(seen.gives), is_linear=True)


@rule("select", "squeeze")
def _one_dimension_less(seen: Seen) -> Rule | None:
    """A dimension that is removed, or may be, is not cut: `squeeze` removes slices of length 1."""
    shape, dim = seen.takes[0], seen.dim(1)
    if not isinstance(dim, int):
        return None
    dim %= len(shape)
    takes = named(shape, [dim])
    is_removed = base_name(seen.call.function) == "select" or shape[dim] == 1
    gives = takes[:dim] + takes[dim + 1 :] if is_removed else takes
    return Rule(takes=(takes,), gives=(gives,) * len(seen.gives), is_linear=True)


@rule("view", "reshape", "flatten", "unflatten")
def _view(seen: Seen) -> Rule | None:
    """Cut the first dimension of each group that is merged or divided.

        (4, 6, 8) -> (24, 8)    "a.b -> ab"    slices of a stay slices; those of `.` would not

    A view of the same bits as another type has no rule.
    """
    if isinstance(seen.argument(1, "dtype"), str):
        return None
    before, after = seen.takes[0], seen.gives[0]
    takes, gives = [WHOLE] * len(before), [WHOLE] * len(after)
    for letter, (i, j) in zip(LETTERS, _group_starts(before, after), strict=False):
        takes[i] = gives[j] = letter
    return Rule(takes=("".join(takes),), gives=("".join(gives),), is_linear=True)


def _group_starts(before: Shape, after: Shape) -> Iterator[tuple[int, int]]:
    """Yield the places, before and after, where groups of dimensions with equal elements begin."""
    i = j = 0
    while i < len(before) and j < len(after):
        yield i, j
        stops = i + 1, j + 1
        while (sizes := (prod(before[i : stops[0]]), prod(after[j : stops[1]])))[0] != sizes[1]:
            is_behind = sizes[0] < sizes[1]
            stops = stops[0] + is_behind, stops[1] + (not is_behind)
        i, j = stops


@rule("expand", "broadcast_to", "expand_as")
def _expand(seen: Seen) -> Rule:
    result = seen.gives[0]
    letters = named(result)
    others = (letters,) * (len(seen.takes) - 1)
    is_linear = not others
    takes = (ends(seen.takes[0], letters, result), *others)
    return Rule(takes=takes, gives=(letters,), is_linear=is_linear)


@rule("repeat")
def _repeat(seen: Seen) -> Rule:
    """Keep repeated dimensions whole."""
    times = seen.argument(1, "repeats")
    times = times if isinstance(times, tuple) else seen.call.arguments[1:]
    new = len(times) - len(seen.takes[0])
    letters = named(seen.gives[0], [d for d, n in enumerate(times) if d < new or n != 1])
    return Rule(takes=(letters[new:],), gives=(letters,), is_linear=True)


@rule("repeat_interleave")
def _repeat_interleave(seen: Seen) -> Rule | None:
    """Slices of what is repeated element by element are as many times longer."""
    times, dim = seen.argument(1, "repeats"), seen.dim(2)
    if not isinstance(times, int) or not isinstance(dim, int) or len(seen.takes) > 1:
        return None
    return Rule(takes=(named(seen.takes[0]),), gives=(named(seen.takes[0]),), is_linear=True)
