"""Rules of operators whose letters depend on more than the shapes of a call."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from penstock.costs.counting.graph import Ref

from .layouts import Shape
from .letters import LETTERS, WHOLE, Rule, Seen, base_name, ends, named, read


def elementwise(seen: Seen) -> Rule:
    """Return the rule of a function that broadcasts its arguments and treats elements alike."""
    (result,) = {*seen.gives}
    letters = named(result)
    takes = tuple(ends(shape, letters, result) for shape in seen.takes)
    return Rule(takes=takes, gives=(letters,) * len(seen.gives))


def arithmetic(seen: Seen) -> Rule:
    """Sums of tensors of one shape are linear, and so is scaling; quotients by tensors are not."""
    call = seen.call
    if base_name(call.function) in ("add", "sub"):
        is_linear = len(seen.takes) == 2 and len(set(seen.takes)) == 1
    else:
        divides = "rtruediv" in call.function or "rdiv" in call.function
        starts = isinstance(call.arguments[0], Ref) if call.arguments else False
        is_linear = len(seen.takes) == 1 and starts and not divides and not call.options
    return replace(elementwise(seen), is_linear=is_linear)


def made(seen: Seen) -> Rule | None:
    """Cut a new tensor as the one it is made beside, along dimensions of equal length."""
    (beside, *others), (result,) = seen.takes, seen.gives
    if others:
        return None
    names = zip(LETTERS, beside, result, strict=False)
    letters = "".join(x if own == new else WHOLE for x, own, new in names)
    takes, gives = (letters.ljust(len(shape), WHOLE) for shape in (beside, result))
    return Rule(takes=(takes,), gives=(gives,))


def norm(seen: Seen) -> Rule | None:
    """Keep whole the dimensions that a norm looks at together."""
    normal = WHOLE * len(seen.argument(1, "normalized_shape"))
    return read(seen, f"input:*{normal}, normalized_shape:, weight:_, bias:_ -> *{normal}")


def einsum(seen: Seen) -> Rule | None:
    """Read the letters of the equation; a diagonal is whole."""
    equation = seen.argument(0, "equation")
    if not isinstance(equation, str) or ("->" not in equation and "..." in equation):
        return None
    takes, arrow, gives = equation.replace(" ", "").partition("->")
    if not arrow:
        gives = "".join(sorted(x for x in {*takes} - {","} if takes.count(x) == 1))
    diagonal = "".join(x for part in takes.split(",") for x in part if part.count(x) > 1)
    notation = f"{takes}->{gives}".replace("...", "~")
    return read(seen, re.sub(f"[{diagonal}]", WHOLE, notation) if diagonal else notation)


def attention(seen: Seen) -> Rule | None:
    """Cut sequences, heads (or their groups), and query positions."""
    query, key, value, *masks = seen.takes
    result = seen.gives[0]
    batch = result[:-2]
    letters = named(batch)
    takes = [f"{ends(query[:-2], letters, batch)}y{WHOLE}"]
    for shape in (key, value):
        batch_letters = ends(shape[:-2], letters, batch)
        if seen.argument(7, "enable_gqa", default=False) and shape[-3] > 1:
            batch_letters = batch_letters[:-1] + letters[-1]
        takes.append(batch_letters + WHOLE * 2)
    for mask in masks:
        takes.append(ends(mask, f"{letters}y{WHOLE}", (*query[:-1], key[-2])))
    is_causal = seen.argument(5, "is_causal", default=False)
    return Rule(takes=tuple(takes), gives=(f"{letters}y{WHOLE}",), skewed="y" if is_causal else "")


def reduced(seen: Seen) -> Rule:
    """Reduce one tensor along some dimensions, or along all; `max` of two is elementwise."""
    if len(seen.takes) > 1:
        return elementwise(seen)
    dims = seen.dim(1)
    dims = None if isinstance(dims, bool) else dims  # of another argument of `var`
    dims = dims if isinstance(dims, tuple) else tuple(d for d in (dims,) if d is not None)
    shape = seen.takes[0]
    reduced = {d % len(shape) for d in dims or range(len(shape))} if shape else set[int]()
    # sums and means give partial sums of a dimension that is cut
    is_sum = base_name(seen.call.function) in ("sum", "mean")
    gives = named(shape, reduced, WHOLE if len(seen.gives[0]) == len(shape) else "")
    return Rule(
        takes=(named(shape, () if is_sum else reduced),),
        gives=(gives,) * len(seen.gives),
        is_linear=is_sum,
    )


def permuted(seen: Seen) -> Rule:
    """Keep the letters, in the order of the result."""
    letters = named(seen.takes[0])
    order = list(range(len(letters)))
    if base_name(seen.call.function) == "permute":
        dims = seen.argument(1, "dims")
        order = [*(dims if isinstance(dims, tuple) else seen.call.arguments[1:])]
    else:
        one, other = seen.argument(1, "dim0"), seen.argument(2, "dim1")
        order[one], order[other] = order[other], order[one]
    gives = "".join(letters[dim] for dim in order)
    return Rule(takes=(letters,), gives=(gives,), is_linear=True)


def view(seen: Seen) -> Rule | None:
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


def repeat(seen: Seen) -> Rule:
    """Keep repeated dimensions whole."""
    times = seen.argument(1, "repeats")
    times = times if isinstance(times, tuple) else seen.call.arguments[1:]
    new = len(times) - len(seen.takes[0])
    letters = named(seen.gives[0], [d for d, n in enumerate(times) if d < new or n != 1])
    return Rule(takes=(letters[new:],), gives=(letters,), is_linear=True)


def embedding(seen: Seen) -> Rule | None:
    """Cut a table unless its forward changes it, or its gradient depends on all words."""
    others = (3, "max_norm"), (5, "scale_grad_by_freq"), (6, "sparse")
    is_odd = any(seen.argument(*argument) for argument in others)
    return None if is_odd else read(seen, "input:*, weight:vn -> *n")


def loss(seen: Seen) -> Rule | None:
    """Cut the vocabulary where targets are numbers of words with equal weights."""
    scores, target = seen.argument(0, "input"), seen.argument(1, "target")
    is_legacy = seen.argument(3, "size_average") is not None
    is_legacy = is_legacy or seen.argument(5, "reduce") is not None
    if is_legacy or not isinstance(scores, Ref) or not isinstance(target, Ref):
        return None
    dims = {tensor: len(x) for tensor, x in zip(seen.call.takes, seen.takes, strict=True)}
    rest = LETTERS[: dims[scores.tensor] - 1]
    has_numbers = dims[target.tensor] == dims[scores.tensor] - 1
    words = "v" if has_numbers and not isinstance(seen.argument(2, "weight"), Ref) else WHOLE
    inputs, targets = rest[:1] + words + rest[1:], rest[:1] + WHOLE * (not has_numbers) + rest[1:]
    gives = rest if seen.argument(6, "reduction", "mean") == "none" else ""
    return read(seen, f"input:{inputs}, target:{targets or '_'}, weight:. -> {gives}")


def convolution(seen: Seen) -> Rule | None:
    """Cut groups between them where each has as many channels out as in."""
    num_spatial = int(seen.call.function[-2])
    whole = WHOLE * num_spatial
    channels, out = (shape[-1 - num_spatial] for shape in (seen.takes[0], seen.gives[0]))
    groups = seen.argument(6, "groups", 1)
    if groups == 1:
        turned = "cn" if "transpose" in seen.call.function else "nc"
        return read(seen, f"input:*c{whole}, weight:{turned}{whole}, +bias:n -> *n{whole}")
    g = "g" if channels == out else WHOLE
    notation = f"input:*{g}{whole}, weight:{g}.{whole}, +bias:{g} -> *{g}{whole}"
    return read(seen, notation, (("g", channels // groups),))


def group_norm(seen: Seen) -> Rule | None:
    """Cut channels between groups."""
    pieces = (("b", seen.takes[0][1] // seen.argument(1, "num_groups")),)
    return read(seen, "input:ab_, num_groups:, weight:b, bias:b -> ab_", pieces)


_EVERY = "slice(None, None, None)"
"""The text of the index `:`."""


def getitem(seen: Seen) -> Rule | None:
    """Cut dimensions that are taken whole, and the dimensions of indices that are tensors.

    x[:, i]    "a., b -> ab"        x[0]    ".b -> b"
    """
    # 1. Find the index of each dimension.
    index = seen.argument(1, "index")
    parts = _per_dimension(index if isinstance(index, tuple) else (index,), len(seen.takes[0]))
    if any(isinstance(part, tuple | bool) for part in parts):
        return None
    shapes = dict(zip(seen.call.takes, seen.takes, strict=True))
    indices = [shapes[part.tensor] for part in parts if isinstance(part, Ref)]
    # 2. Name the dimensions of the tensor; those that are taken whole stay in the result.
    takes, gives, places = "", list[str](), list[int]()
    letters = iter(LETTERS)
    for part in parts:
        name = next(letters) if part == _EVERY else WHOLE
        takes += "" if part is None else name
        if isinstance(part, Ref):
            places.append(len(gives))
        elif not isinstance(part, int):
            gives.append(name)
    # 3. Put the dimensions of the indices into the result; in front if they do not stand together.
    names, of_each = _of_indices(indices, letters)
    at = places[0] if places and places == [places[0]] * len(places) else 0
    gives[at:at] = names
    if len(gives) != len(seen.gives[0]):  # a list among the indices looks like several of them
        return None
    is_linear = len(seen.takes) == 1
    return Rule(takes=(takes, *of_each), gives=("".join(gives),), is_linear=is_linear)


def _per_dimension(index: tuple[Any, ...], dims: int) -> list[Any]:
    """Return the index of each dimension, without an ellipsis; None stands for a new dimension."""
    used = sum(part is not None and part != "Ellipsis" for part in index)
    rest = [_EVERY] * (dims - used)
    at = index.index("Ellipsis") if "Ellipsis" in index else len(index)
    return [*index[:at], *rest, *index[at + 1 :]]


def _of_indices(shapes: Sequence[Shape], letters: Iterator[str]) -> tuple[str, list[str]]:
    """Name the dimensions of the broadcast indices, and the dimensions of each index."""
    longest = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (longest - len(shape)) + shape for shape in shapes]
    together = tuple(max(lengths) for lengths in zip(*padded, strict=True))
    names = "".join(next(letters) for _ in together)
    return names, [ends(shape, names, together) for shape in shapes]


def pad(seen: Seen) -> Rule:
    """Padding by zeros, or by values of the tensor, is linear.

    Dimensions that are padded by nothing are whole too: images of another size may want it.
    """
    num_padded = len(tuple(seen.argument(1, "pad"))) // 2
    letters = LETTERS[: len(seen.takes[0]) - num_padded] + WHOLE * num_padded
    return Rule(takes=(letters,), gives=(letters,), is_linear=not seen.argument(3, "value"))
