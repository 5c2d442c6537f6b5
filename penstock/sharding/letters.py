"""Letters of operators: a notation that names the dimensions of a call's tensors.

    linear         "input:*k, weight:nk, +bias:n -> *n"
    matmul         "~yk, ~kn -> ~yn"
    index_select   "input:<.>, dim=, index:y -> <y>"
    transpose      "ab => ba"

    a, b, ...   a dimension
    .           a dimension that is whole
    *           the other dimensions of the first tensor
    _           the other dimensions of a tensor, which are whole
    ~           dimensions that broadcast, aligned at their end
    < >         the dimensions before and after the argument `dim`
    +           marks the argument that is added to a product; it broadcasts
    |           separates notations; the first one that fits the shapes holds
    =>          stands for -> where partial sums of all tensors give partial sums

Arguments with names stand in the order of the signature: "x:" is no tensor, and "dim=0" has its
default.  Arguments without names are the tensors of a call in their order.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

from penstock.costs.counting.graph import Call, Graph, Ref

from .layouts import Shape

LETTERS = "abcdefghijlmopqrstuvwxyz"
"""Names of dimensions; k and n are left to products: the sum's dimension and the columns."""
WHOLE = "."
"""A dimension that is not cut: it has length 1 where others are longer, or is needed whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The letters of each dimension of a call's arguments and results."""

    takes: tuple[str, ...]
    """Letters of each argument."""
    gives: tuple[str, ...]
    """Letters of each result."""
    is_linear: bool = False
    """True where partial sums of all arguments together give partial sums."""
    bias: int | None = None
    """The place of the argument that is added to a product."""
    pieces: tuple[tuple[str, int], ...] = ()
    """Letters whose slices are multiples of a length, with that length; 1 for all others."""
    skewed: str = ""
    """Letters along which work grows, as queries of a causal mask."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A call with the shapes of its arguments and results."""

    call: Call
    takes: tuple[Shape, ...]
    gives: tuple[Shape, ...]

    @classmethod
    def of(cls, graph: Graph, call: Call) -> "Seen":
        """Look up the shapes of a call."""
        tensors = graph.tensors
        takes, gives = (tuple(tensors[n].shape for n in x) for x in (call.takes, call.gives))
        return cls(call, takes, gives)

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument that may be given by its place or by its name."""
        return self.call.argument(place, name, default)

    def dim(self, place: int, default: int | None = None) -> Any:
        """Return the argument `dim`, which torch also takes as `axis`."""
        return self.argument(place, "dim", dict(self.call.options).get("axis", default))


@lru_cache(maxsize=4096)
def base_name(function: str) -> str:
    """Return a function's name without its module and its spelling as an operator.

    torch.Tensor.__add__, torch.add and torch.Tensor.add_ have one name.  torch.rand_like and
    torch.zeros_like have one, too: training may call the one and evaluation the other.
    """
    name = function.rpartition(".")[2]
    if name == "__get__":
        name = function.split(".")[-2]
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
        stripped = name[1:]
        name = stripped if stripped in _REFLECTED else name
        return _SPELLED.get(name, name)
    return _SPELLED.get(name.rstrip("_"), name.rstrip("_"))


_REFLECTED = ("add", "sub", "mul", "truediv")
_SPELLED = {
    "truediv": "div",
    "true_divide": "div",
    "subtract": "sub",
    "multiply": "mul",
    "iadd": "add",
    "isub": "sub",
    "imul": "mul",
    "swapaxes": "transpose",
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "empty_like"), "made_like"),
    **dict.fromkeys(("rand_like", "randn_like", "randint_like"), "made_like"),
}


def named(shape: Shape, whole: Collection[int] = (), instead: str = WHOLE) -> str:
    """Name all dimensions but those that are needed whole, which are called `instead`."""
    letters = LETTERS[: len(shape)]
    return "".join(instead if d in whole else x for d, x in enumerate(letters))


def ends(shape: Shape, letters: str, result: Shape) -> str:
    """Name the dimensions of a tensor that broadcasts to `result`, whose names are `letters`."""
    first = len(result) - len(shape)
    lengths = zip(shape, result[first:], letters[first:], strict=True)
    return "".join(x if length == full else WHOLE for length, full, x in lengths)


def read(seen: Seen, notation: str, pieces: tuple[tuple[str, int], ...] = ()) -> Rule | None:
    """Return the rule that a notation says; None if the call has other tensors or shapes."""
    rules = (_read(seen, part, pieces) for part in notation.split("|"))
    return next(filter(None, rules), None)


def _read(seen: Seen, notation: str, pieces: tuple[tuple[str, int], ...]) -> Rule | None:
    # 1. Find the letters of each tensor, and the dimension that an argument names.
    arguments, arrow, result = re.split("([-=]>)", notation)
    letters_of, dim = _arguments(seen, arguments.split(","))
    if letters_of.keys() != {*seen.call.takes} or not isinstance(dim, int):
        return None
    marked = [letters_of[tensor] for tensor in seen.call.takes]
    names = [x.lstrip("+") for x in marked] + [result.strip()] * len(seen.gives)
    shapes = (*seen.takes, *seen.gives)

    # 2. Write letters in the place of the signs.
    free = "".join(x for x in LETTERS if not any(x in own for own in names))
    pairs = list(zip(names, shapes, strict=True))
    rests = [len(shape) - len(re.sub("[*_~<>]", "", x)) for x, shape in pairs]
    most = max((rest for rest, x in zip(rests, names, strict=True) if "~" in x), default=0)
    count = max(rests[0], 0)
    dim %= count + 1
    signs = {"*": free[:count], "<": free[:dim], ">": free[dim + 1 : count + 1]}
    for place, rest in enumerate(rests):
        own = {"_": WHOLE * rest, "~": free[most - max(rest, 0) : most]}
        names[place] = names[place].translate(str.maketrans(signs | own))
    bias = next((place for place, x in enumerate(marked) if x[:1] == "+"), None)
    if bias is not None:
        names[bias] = names[bias][max(0, len(names[bias]) - len(shapes[bias])) :]
    if any(len(x) != len(shape) for x, shape in zip(names, shapes, strict=True)):
        return None

    # 3. Keep dimensions whole that broadcast, and those around `dim` whose lengths differ.
    lengths: dict[str, set[int]] = {}
    for letter, length in chain(*map(zip, names, shapes if "~" in result else seen.takes)):
        lengths.setdefault(letter, set()).add(length)
    unlike = {x for x, own in lengths.items() if "<" in arguments and len(own) > 1}
    takes = tuple(
        "".join(WHOLE if x in unlike or n < max(lengths[x]) else x for x, n in pair)
        for pair in map(zip, names, seen.takes)
    )
    gives = tuple("".join(WHOLE if x in unlike else x for x in own) for own in names[len(takes) :])
    return Rule(takes=takes, gives=gives, is_linear=arrow == "=>", bias=bias, pieces=pieces)


def _arguments(seen: Seen, arguments: list[str]) -> tuple[dict[int, str], Any]:
    """Return the letters of each tensor by number, and the value of `dim`; 0 without it."""
    letters_of: dict[int, str] = {}
    dim: Any = 0
    for place, argument in enumerate(arguments):
        name, is_named, letters = argument.strip().rpartition(":")
        if "=" in letters:
            default = letters.partition("=")[2]
            dim = seen.dim(place, int(default) if default else None)
        elif not is_named:
            letters_of.update(dict.fromkeys(seen.call.takes[place : place + 1] or [-1], letters))
        elif letters:
            value = seen.argument(place, name.lstrip("+"))
            values = value if isinstance(value, tuple) else (value,)
            mark = "+" * name.startswith("+")
            letters_of |= {x.tensor: mark + letters for x in values if isinstance(x, Ref)}
    return letters_of, dim
