"""Rules of functions with indices: items, gather, scatter, embeddings and losses of classes.

embedding     "*, vn -> *n"    along v, the vocabulary: rows of other devices are zeros
cross_entropy "av, a ->"       along a: partial sums of a mean; along v likewise
"""

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.costs.counting.graph import Ref

from .layouts import Shape
from .rules import LETTERS, WHOLE, Rule, Seen, ends, named, rule, spell, spelled

spelled("one_hot", "tensor * -> *.")


@rule("embedding")
def _embedding(seen: Seen) -> Rule | None:
    """Cut a table unless its forward changes it, or its gradient depends on all words."""
    if seen.argument(3, "max_norm") or any(
        seen.argument(place, name, default=False)
        for place, name in ((5, "scale_grad_by_freq"), (6, "sparse"))
    ):
        return None
    return spell(seen, "input *, weight vn -> *n")


@rule("cross_entropy", "nll_loss")
def _loss(seen: Seen) -> Rule | None:
    """Cut the vocabulary where targets are numbers of words with equal weights."""
    scores, target = seen.argument(0, "input"), seen.argument(1, "target")
    is_legacy = seen.argument(3, "size_average") is not None
    is_legacy = is_legacy or seen.argument(5, "reduce") is not None
    if is_legacy or not isinstance(scores, Ref) or not isinstance(target, Ref):
        return None
    dims = {tensor: len(x) for tensor, x in zip(seen.call.takes, seen.takes, strict=True)}
    rest = LETTERS[: dims[scores.tensor] - 1]
    batch, others = rest[:1], rest[1:]
    has_numbers = dims[target.tensor] == dims[scores.tensor] - 1
    has_weights = isinstance(seen.argument(2, "weight"), Ref)
    words = "v" if has_numbers and not has_weights else WHOLE
    targets = rest if has_numbers else f"{batch}.{others}"
    gives = rest if seen.argument(6, "reduction", "mean") == "none" else ""
    return spell(seen, f"input {batch}{words}{others}, target {targets}, weight . -> {gives}")


@rule("gather")
def _gather(seen: Seen) -> Rule | None:
    """Cut the index along `dim` too: each device looks into all rows of the tensor."""
    if len(seen.takes) != 2:
        return None
    tensor, index = seen.takes
    dim = seen.dim(1) % max(1, len(tensor))
    whole = [d for d, (a, b) in enumerate(zip(tensor, index, strict=True)) if a != b and d != dim]
    return Rule(
        takes=(named(tensor, [*whole, dim]), named(index, whole)), gives=(named(index, whole),)
    )


@rule("scatter", "scatter_add")
def _scatter(seen: Seen) -> Rule | None:
    tensor, *others = seen.takes
    dim = seen.dim(1) % max(1, len(tensor))
    lengths = list(zip(tensor, *others, strict=True))
    letters = named(tensor, [dim, *(d for d, own in enumerate(lengths) if len({*own}) > 1)])
    return Rule(takes=(letters,) * len(seen.takes), gives=(letters,))


@rule("index_select", "index_add", "index_copy")
def _indexed(seen: Seen) -> Rule | None:
    """Cut selected rows along the index; added and copied rows stay whole along it."""
    tensor, index, *source = seen.takes
    dim = seen.dim(1) % max(1, len(tensor))
    letters = named(tensor, [dim])
    if source:
        return Rule(takes=(letters, WHOLE, letters), gives=(letters,))
    gives = letters[:dim] + "y" + letters[dim + 1 :]
    return Rule(takes=(letters, "y"[: len(index)]), gives=(gives,)) if index else None


_EVERY = "slice(None, None, None)"
"""The text of the index `:`."""


@rule("getitem")
def _getitem(seen: Seen) -> Rule | None:
    """Cut dimensions that are taken whole, and the dimensions of indices that are tensors.

    x[:, i]    "a., b -> ab"        x[0]    ".b -> b"
    """
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
    names, of_each = _of_indices(indices, letters)
    # several indices that do not stand together have their dimensions in front
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
