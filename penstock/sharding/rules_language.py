"""Rules of what language models are made of: attention, products, selection and experts."""

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any

from penstock.costs.counting.graph import Ref

from .layouts import Shape
from .rules import LETTERS, WHOLE, Rule, Seen, base_name, elementwise, rule
from .rules_vision import reduced


def _named(shape: Shape, whole: Collection[int] = ()) -> str:
    """Name all dimensions but those that are needed whole."""
    return "".join(WHOLE if d in whole else x for d, x in enumerate(LETTERS[: len(shape)]))


def _ends(shape: Shape, letters: str, result: Shape) -> str:
    """Name the dimensions of what broadcasts to `result`, whose names are `letters`."""
    first = len(result) - len(shape)
    rest = zip(shape, result[first:], letters[first:], strict=True)
    return "".join(x if own == full else WHOLE for own, full, x in rest)


# -- element by element ---------------------------------------------------------------------------


rule(
    *("exp2", "log2", "and", "or", "xor", "invert", "isinf", "isnan", "isfinite", "nan_to_num"),
    *("rsub", "rpow", "floordiv", "floor_divide", "mod", "remainder", "fmod"),
    *("made_like", "int", "short"),
)(elementwise)


@rule("new_zeros", "new_ones", "new_full", "new_empty")
def _made(seen: Seen) -> Rule | None:
    """Cut what is made as the tensor that it is made beside, along dimensions that are as long."""
    (beside, *others), (result,) = seen.takes, seen.gives
    if others:
        return None
    names = zip(LETTERS, beside, result, strict=False)
    letters = "".join(x if own == new else WHOLE for x, own, new in names)
    takes, gives = (letters.ljust(len(shape), WHOLE) for shape in (beside, result))
    return Rule(takes=(takes,), gives=(gives,))


@rule("to", "type_as", "type")
def _as_type(seen: Seen) -> Rule:
    """What is given beside a tensor only says which type."""
    tensor, *others = seen.takes
    rest = tuple(WHOLE * len(shape) for shape in others)
    return Rule(takes=(_named(tensor), *rest), gives=(_named(tensor),))


@rule("detach", "positive")
def _same(seen: Seen) -> Rule:
    letters = _named(seen.takes[0])
    return Rule(takes=(letters,), gives=(letters,), is_linear=True)


# -- products -------------------------------------------------------------------------------------


@rule("matmul", "mm", "bmm", "mv", "dot")
def _matmul(seen: Seen) -> Rule | None:
    return _product(seen.takes, seen.gives[0])


def _product(factors: Sequence[Shape], result: Shape) -> Rule | None:
    """Name rows y, columns n and what is summed over k; a vector has neither rows nor columns."""
    if len(factors) != 2:
        return None
    left, right = factors
    outer = "y" * (len(left) > 1) + "n" * (len(right) > 1)
    batch = result[: len(result) - len(outer)]
    letters = _named(batch)
    takes = (
        _ends(left[:-2], letters, batch) + "yk"[-min(2, len(left)) :],
        _ends(right[:-2], letters, batch) + "kn"[: len(right)],
    )
    return Rule(takes=takes, gives=(letters + outer,))


@rule("addmm", "baddbmm", "addmv")
def _added_product(seen: Seen) -> Rule | None:
    """What is added is a part of the sum only once where k is cut."""
    added, *factors = seen.takes
    found = _product(factors, seen.gives[0])
    if found is None:
        return None
    takes = (_ends(added, found.gives[0], seen.gives[0]), *found.takes)
    return Rule(takes=takes, gives=found.gives, bias=0)


@rule("einsum")
def _einsum(seen: Seen) -> Rule | None:
    """Take the letters of the equation, but not those of a diagonal."""
    equation = seen.argument(0, "equation")
    if not isinstance(equation, str):
        return None
    given, _, result = (part.strip() for part in equation.replace(" ", "").partition("->"))
    parts = given.split(",")
    if len(parts) != len(seen.takes) or ("->" not in equation and "..." in equation):
        return None
    if "->" not in equation:
        result = "".join(sorted(x for x in {*given} - {","} if given.count(x) == 1))
    dots = "".join(x for x in LETTERS if x not in equation)
    most = max(len(x) - len(p.replace("...", "")) for x, p in zip(seen.takes, parts, strict=True))
    dots = dots[:most]
    takes = [_spelled(p, dots, len(x)) for p, x in zip(parts, seen.takes, strict=True)]
    lengths: dict[str, int] = {}
    for letter, length in chain(*map(zip, takes, seen.takes)):
        lengths[letter] = max(length, lengths.get(letter, 0))
    diagonal = {x for part in takes for x in part if part.count(x) > 1}
    own = (zip(part, shape, strict=True) for part, shape in zip(takes, seen.takes, strict=True))
    names = tuple(
        "".join(WHOLE if x in diagonal or n != lengths[x] else x for x, n in part) for part in own
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
    """Cut sequences, heads, and positions that look where they are not counted.

    Heads that are looked at in groups are cut along the groups.
    """
    query, key, value, *masks = seen.takes
    result = seen.gives[0]
    batch = result[:-2]
    letters = _named(batch)
    row = WHOLE if seen.argument(5, "is_causal", default=False) else "y"
    takes = [_ends(query[:-2], letters, batch) + row + WHOLE]
    for shape in (key, value):
        own = _ends(shape[:-2], letters, batch)
        if seen.argument(7, "enable_gqa", default=False) and shape[-3] > 1:
            own = own[:-1] + letters[-1]
        takes.append(own + WHOLE * 2)
    for mask in masks:
        takes.append(_ends(mask, f"{letters}{row}{WHOLE}", (*query[:-1], key[-2])))
    return Rule(takes=tuple(takes), gives=(f"{letters}{row}{WHOLE}",))


# -- along a dimension ----------------------------------------------------------------------------

_ALONG = {
    **dict.fromkeys(("cumsum", "cumprod", "softmax", "log_softmax", "argsort", "sort"), (1, -1)),
    **dict.fromkeys(("topk", "kthvalue"), (2, -1)),
    "narrow": (1, 0),
}
"""Where functions are told the dimension along which they work, and which it is otherwise."""
_LINEAR = ("cumsum", "narrow")


@rule(*_ALONG)
def _along(seen: Seen) -> Rule | None:
    """Keep whole what is looked at together: the others are cut in all results alike."""
    dims = len(seen.takes[0])
    place, default = _ALONG[base_name(seen.call.function)]
    dim = seen.argument(place, "dim", default)
    if not isinstance(dim, int) or not dims:
        return None
    letters = _named(seen.takes[0], [dim % dims])
    is_linear = base_name(seen.call.function) in _LINEAR
    return Rule(takes=(letters,), gives=(letters,) * len(seen.gives), is_linear=is_linear)


@rule("select")
def _without_one(seen: Seen) -> Rule:
    dim = seen.argument(1, "dim", 0) % len(seen.takes[0])
    letters = _named(seen.takes[0], [dim])
    gives = (letters[:dim] + letters[dim + 1 :],) * len(seen.gives)
    return Rule(takes=(letters,), gives=gives, is_linear=True)


@rule("argmax", "argmin", "max", "min", "count_nonzero", "median")
def _chosen(seen: Seen) -> Rule | None:
    """Of one tensor, along a dimension or of all; of two, element by element."""
    if len(seen.takes) > 1:
        return elementwise(seen)
    return reduced(seen, cuts_reduced=False)


@rule("one_hot")
def _one_hot(seen: Seen) -> Rule:
    letters = _named(seen.takes[0])
    return Rule(takes=(letters,), gives=(letters + WHOLE,))


@rule("tril", "triu")
def _triangle(seen: Seen) -> Rule:
    dims = len(seen.takes[0])
    letters = _named(seen.takes[0], (dims - 2, dims - 1))
    return Rule(takes=(letters,), gives=(letters,), is_linear=True)


@rule("gather")
def _gather(seen: Seen) -> Rule | None:
    """Cut along the index's own dimension, too: each device looks into all of the other."""
    if len(seen.takes) != 2:
        return None
    tensor, index = seen.takes
    dim = seen.argument(1, "dim") % max(1, len(tensor))
    whole = [d for d, (a, b) in enumerate(zip(tensor, index, strict=True)) if a != b and d != dim]
    return Rule(
        takes=(_named(tensor, [*whole, dim]), _named(index, whole)), gives=(_named(index, whole),)
    )


@rule("scatter", "scatter_add")
def _scatter(seen: Seen) -> Rule | None:
    tensor, *others = seen.takes
    dim = seen.argument(1, "dim") % max(1, len(tensor))
    lengths = list(zip(tensor, *others, strict=True))
    letters = _named(tensor, [dim, *(d for d, own in enumerate(lengths) if len({*own}) > 1)])
    return Rule(takes=(letters,) * len(seen.takes), gives=(letters,))


@rule("index_select", "index_add", "index_copy")
def _indexed(seen: Seen) -> Rule | None:
    """What is selected may be cut along the index; what is added may not."""
    tensor, index, *source = seen.takes
    dim = seen.argument(1, "dim") % max(1, len(tensor))
    letters = _named(tensor, [dim])
    if source:
        return Rule(takes=(letters, WHOLE, letters), gives=(letters,))
    gives = letters[:dim] + "y" + letters[dim + 1 :]
    return Rule(takes=(letters, "y"[: len(index)]), gives=(gives,)) if index else None


# -- shapes ---------------------------------------------------------------------------------------


@rule("expand", "broadcast_to", "expand_as")
def _expand(seen: Seen) -> Rule:
    result = seen.gives[0]
    letters = _named(result)
    others = (letters,) * (len(seen.takes) - 1)
    is_linear = not others
    takes = (_ends(seen.takes[0], letters, result), *others)
    return Rule(takes=takes, gives=(letters,), is_linear=is_linear)


@rule("repeat")
def _repeat(seen: Seen) -> Rule:
    """What is repeated stays whole."""
    times = seen.argument(1, "repeats")
    times = times if isinstance(times, tuple) else seen.call.arguments[1:]
    new = len(times) - len(seen.takes[0])
    letters = _named(seen.gives[0], [d for d, n in enumerate(times) if d < new or n != 1])
    return Rule(takes=(letters[new:],), gives=(letters,), is_linear=True)


@rule("repeat_interleave")
def _repeat_interleave(seen: Seen) -> Rule | None:
    """Slices of what is repeated element by element are as many times longer."""
    times, dim = seen.argument(1, "repeats"), seen.argument(2, "dim")
    if not isinstance(times, int) or not isinstance(dim, int) or len(seen.takes) > 1:
        return None
    return Rule(takes=(_named(seen.takes[0]),), gives=(_named(seen.takes[0]),), is_linear=True)


@rule("squeeze")
def _squeeze(seen: Seen) -> Rule | None:
    """A dimension that may be gone is not cut: a slice of length 1 would be gone, too."""
    shape, dim = seen.takes[0], seen.argument(1, "dim")
    if not isinstance(dim, int):
        return None
    dim %= len(shape)
    takes = _named(shape, [dim])
    gives = takes if shape[dim] != 1 else takes[:dim] + takes[dim + 1 :]
    return Rule(takes=(takes,), gives=(gives,), is_linear=True)


@rule("T", "t", "mT")
def _transposed(seen: Seen) -> Rule | None:
    letters = _named(seen.takes[0])
    if len(letters) != 2 and (len(letters) < 2 or ".mT." not in seen.call.function):
        return None
    gives = letters[:-2] + letters[:-3:-1]
    return Rule(takes=(letters,), gives=(gives,), is_linear=True)


# -- indices --------------------------------------------------------------------------------------

_EVERY = "slice(None, None, None)"


@rule("getitem")
def _getitem(seen: Seen) -> Rule | None:
    """Dimensions that are taken whole keep their slices; indices that are tensors may be cut."""
    index = seen.argument(1, "index")
    parts = _per_dimension(index if isinstance(index, tuple) else (index,), len(seen.takes[0]))
    if any(isinstance(part, tuple | bool) for part in parts):
        return None
    shapes = dict(zip(seen.call.takes, seen.takes, strict=True))
    indices = [shapes[part.tensor] for part in parts if isinstance(part, Ref)]
    takes, gives = "", list[str]()
    places = list[int]()
    letters = iter(LETTERS)
    for part in parts:
        name = next(letters) if part == _EVERY else WHOLE
        takes += "" if part is None else name
        if isinstance(part, Ref):
            places.append(len(gives))
        elif not isinstance(part, int):
            gives.append(name)
    own = _of_indices(indices, letters)
    # several indices that do not stand together have their dimensions in front
    at = places[0] if places and places == [places[0]] * len(places) else 0
    gives[at:at] = own[0]
    if len(gives) != len(seen.gives[0]):  # a list among the indices looks like several of them
        return None
    is_linear = len(seen.takes) == 1
    return Rule(takes=(takes, *own[1]), gives=("".join(gives),), is_linear=is_linear)


def _per_dimension(index: tuple[Any, ...], dims: int) -> list[Any]:
    """Say of each dimension what is taken of it; None stands for a new one."""
    used = sum(part is not None and part != "Ellipsis" for part in index)
    rest = [_EVERY] * (dims - used)
    found = list[Any]()
    for part in index:
        found += rest if part == "Ellipsis" else [part]
    return found if "Ellipsis" in index else found + rest


def _of_indices(shapes: Sequence[Shape], letters: Iterator[str]) -> tuple[str, list[str]]:
    """Name the dimensions that indices bring together, and those of each."""
    longest = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (longest - len(shape)) + shape for shape in shapes]
    together = tuple(max(lengths) for lengths in zip(*padded, strict=True))
    names = "".join(next(letters) for _ in together)
    return names, [_ends(shape, names, together) for shape in shapes]
