"""Rules: how the calls of torch's functions may be divided along one axis of a mesh.

A rule names the dimensions of what a call takes and gives by letters, as an einsum does:

    linear    "abk,nk,n->abn"    cut along b:  S(1), R, R    -> S(1)
                                 cut along n:  R, S(0), S(0) -> S(2)    by columns
                                 cut along k:  S(2), S(1), P -> P       by rows: one adds the bias

One letter is cut at a time: what has it is a shard, of what lacks it each device needs the whole
(its gradient is a partial sum), and a result that lacks it is a partial sum.  Every call can also
be done by all devices alike.  What has no rule is done so only, and named in the plan.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

from penstock.costs.counting.graph import Call, Graph, Ref
from penstock.costs.counting.opaque_modules import OPAQUE

from .layouts import I, Layout, P, R, S, Shape, State

LETTERS = "abcdefghijlmopqrstuvwxyz"
WHOLE = "."
"""A dimension that is not cut: of length 1 where others are longer, or needed whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What may be cut in a call: letters for each dimension of what it takes and gives.

    A result is linear in all that it takes together if `is_linear`: of partial sums it gives
    partial sums.  `bias` is the place of what is added to a product.  `pieces` says of letters how
    long the pieces are, of the first tensor that has one, which are not cut; 1 otherwise.
    """

    takes: tuple[str, ...]
    gives: tuple[str, ...]
    is_linear: bool = False
    bias: int | None = None
    pieces: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to divide a call along an axis: a state for each tensor it takes and gives.

    `cut` is the letter that is cut; "" where all devices do the same.  Slices of the first tensor
    that has it are multiples of `piece` long.
    """

    takes: tuple[State, ...]
    gives: tuple[State, ...]
    cut: str = ""
    piece: int = 1


ALIKE = Choice((), ())
"""All devices do the same, of a call that is in no plan."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A call with the shapes of its tensors, as rules look at it."""

    call: Call
    takes: tuple[Shape, ...]
    gives: tuple[Shape, ...]

    @classmethod
    def of(cls, graph: Graph, call: Call) -> "Seen":
        """Look a call's shapes up."""
        tensors = graph.tensors
        takes, gives = (tuple(tensors[n].shape for n in x) for x in (call.takes, call.gives))
        return cls(call, takes, gives)

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument that may be given by its place or by its name."""
        return self.call.argument(place, name, default)


FindRule = Callable[[Seen], Rule | None]
_RULES: dict[str, FindRule] = {}


def rule(*names: str) -> Callable[[FindRule], FindRule]:
    """Register what finds the rule of functions with these names."""

    def register(find: FindRule) -> FindRule:
        _RULES.update(dict.fromkeys(names, find))
        return find

    return register


@lru_cache(maxsize=4096)
def base_name(function: str) -> str:
    """Return a function's name without where it lives, and without how it is spelled in code.

    torch.Tensor.__add__, torch.add and torch.Tensor.add_ are one; so are torch.rand_like and
    torch.zeros_like, of which training may call one and evaluation the other.
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


@lru_cache(maxsize=1 << 14)
def choices(seen: Seen, count: int) -> tuple[Choice, ...]:
    """Return all ways to divide a call among `count` devices, those by all alike first."""
    num_takes, num_gives = len(seen.takes), len(seen.gives)
    found = [Choice((state,) * num_takes, (state,) * num_gives) for state in (I, R)]
    own = find(seen)
    if own is None:
        return tuple(found)
    if own.is_linear and num_takes:
        found.append(Choice((P,) * num_takes, (P,) * num_gives))
    letters = dict.fromkeys("".join((*own.takes, *own.gives)).replace(WHOLE, ""))
    found += [_cut(own, letter) for letter in letters]
    return tuple(choice for choice in found if _is_enough(seen, (choice,), (count,)))


def divisions(seen: Seen, mesh: Sequence[int]) -> tuple[tuple[Choice, ...], ...]:
    """Return all ways to divide a call along each axis of a mesh."""
    return tuple(choices(seen, count) for count in mesh)


def together(
    seen: Seen, by_axis: Sequence[Sequence[Choice]], mesh: tuple[int, ...]
) -> list[tuple[Choice, ...]]:
    """Return a choice for each axis, in all ways that leave each device something."""
    return [own for own in product(*by_axis) if _is_enough(seen, own, mesh)]


@lru_cache(maxsize=1 << 16)
def fits(shape: Shape, layout: Layout, mesh: tuple[int, ...]) -> bool:
    """Tell whether each device gets something of a tensor: of one without elements, when whole."""
    return all(
        max(length, 1)
        >= prod(n for n, s in zip(mesh, layout, strict=True) if isinstance(s, S) and s.dim == d)
        for d, length in enumerate(shape)
    )


def _is_enough(seen: Seen, own: Sequence[Choice], mesh: tuple[int, ...]) -> bool:
    """Tell whether each device gets something of what is cut."""
    takes = zip(seen.takes, zip(*(choice.takes for choice in own), strict=True), strict=True)
    gives = zip(seen.gives, zip(*(choice.gives for choice in own), strict=True), strict=True)
    tensors = [*takes, *gives]
    if not all(fits(shape, layout, mesh) for shape, layout in tensors):
        return False
    for axis, choice in enumerate(own):
        parts = prod(n for n, other in zip(mesh, own, strict=True) if other.cut == choice.cut)
        cut = (shape[x.dim] for shape, layout in tensors if isinstance(x := layout[axis], S))
        if next(cut, parts * choice.piece) < parts * choice.piece:
            return False
    return True


def find(seen: Seen) -> Rule | None:
    """Return the rule of a call; None where there is none, or it is given one tensor twice: rules
    speak of tensors that differ.
    """
    if len(seen.call.uses) > len(seen.takes):
        return None
    opaque = OPAQUE.get(seen.call.function)
    if opaque is not None:
        return Rule(takes=opaque.letters, gives=(opaque.gives,))
    finder = _RULES.get(base_name(seen.call.function))
    return None if finder is None else finder(seen)


def _cut(own: Rule, letter: str) -> Choice:
    gives = tuple(S(name.index(letter)) if letter in name else P for name in own.gives)
    takes: list[State] = [S(name.index(letter)) if letter in name else R for name in own.takes]
    if own.bias is not None and letter not in own.takes[own.bias] and P in gives:
        takes[own.bias] = P
    return Choice(tuple(takes), gives, letter, dict(own.pieces).get(letter, 1))


# -- the rules ------------------------------------------------------------------------------------


def _letters(count: int) -> str:
    return LETTERS[:count]


def _broadcast(seen: Seen) -> Rule:
    """Name the dimensions of what is combined element by element."""
    (result,) = {*seen.gives}
    letters = _letters(len(result))
    takes = []
    for shape in seen.takes:
        ends = letters[len(letters) - len(shape) :]
        pairs = zip(ends, shape, result[len(result) - len(shape) :], strict=True)
        takes.append("".join(x if own == full else WHOLE for x, own, full in pairs))
    return Rule(takes=tuple(takes), gives=(letters,) * len(seen.gives))


@rule(
    *("gelu", "relu", "silu", "tanh", "sigmoid", "exp", "log", "sqrt", "rsqrt", "pow", "abs"),
    *("where", "lt", "gt", "le", "ge", "eq", "ne", "clamp", "square", "softplus", "erf"),
    *("masked_fill", "float", "long", "bool", "half", "bfloat16", "double"),
)
def elementwise(seen: Seen) -> Rule:
    """Find the rule of what is done to each element alike, and is not linear."""
    return _broadcast(seen)


@rule("add", "sub")
def _sum(seen: Seen) -> Rule:
    own = _broadcast(seen)
    is_linear = len(seen.takes) == 2 and len(set(seen.takes)) == 1
    return Rule(takes=own.takes, gives=own.gives, is_linear=is_linear)


@rule("mul", "div")
def _product(seen: Seen) -> Rule:
    """Scaling by a number is linear; a number divided by a tensor is not, nor what is rounded."""
    own, call = _broadcast(seen), seen.call
    divides = "rtruediv" in call.function or "rdiv" in call.function
    starts = isinstance(call.arguments[0], Ref) if call.arguments else False
    is_scaled = len(seen.takes) == 1 and starts and not divides and not call.options
    return Rule(takes=own.takes, gives=own.gives, is_linear=is_scaled)


@rule("neg", "contiguous", "clone", "dropout")
def _one_linear(seen: Seen) -> Rule:
    letters = _letters(len(seen.takes[0]))
    return Rule(takes=(letters,), gives=(letters,), is_linear=True)


@rule("linear")
def _linear(seen: Seen) -> Rule:
    rows = _letters(len(seen.takes[0]) - 1)
    takes = (f"{rows}k", "nk", "n")[: len(seen.takes)]
    bias = 2 if len(takes) == 3 else None
    return Rule(takes=takes, gives=(f"{rows}n",), bias=bias)


@rule("layer_norm", "rms_norm")
def _norm(seen: Seen) -> Rule:
    shape, normal = seen.takes[0], seen.argument(1, "normalized_shape")
    letters = _letters(len(shape) - len(normal)) + WHOLE * len(normal)
    rest = tuple(WHOLE * len(other) for other in seen.takes[1:])
    return Rule(takes=(letters, *rest), gives=(letters,))


@rule("transpose")
def _transpose(seen: Seen) -> Rule:
    letters = list(_letters(len(seen.takes[0])))
    one, other = seen.argument(1, "dim0"), seen.argument(2, "dim1")
    before = "".join(letters)
    letters[one], letters[other] = letters[other], letters[one]
    return Rule(takes=(before,), gives=("".join(letters),), is_linear=True)


@rule("permute")
def _permute(seen: Seen) -> Rule:
    letters = _letters(len(seen.takes[0]))
    dims = seen.argument(1, "dims")
    dims = dims if isinstance(dims, tuple) else seen.call.arguments[1:]
    return Rule(takes=(letters,), gives=("".join(letters[d] for d in dims),), is_linear=True)


@rule("unsqueeze")
def _unsqueeze(seen: Seen) -> Rule:
    letters, dims = _letters(len(seen.takes[0])), len(seen.gives[0])
    dim = seen.argument(1, "dim") % dims
    return Rule(takes=(letters,), gives=(letters[:dim] + WHOLE + letters[dim:],), is_linear=True)


@rule("view", "reshape", "flatten", "unflatten")
def _view(seen: Seen) -> Rule | None:
    """Only the first dimension of a group that is merged or divided keeps its slices whole; the
    same bits as another type are no such view.
    """
    if isinstance(seen.argument(1, "dtype"), str):
        return None
    takes, gives = _grouped(seen.takes[0], seen.gives[0])
    return Rule(takes=(takes,), gives=(gives,), is_linear=True)


def _grouped(before: Shape, after: Shape) -> tuple[str, str]:
    takes, gives = [WHOLE] * len(before), [WHOLE] * len(after)
    for letter, (i, j) in zip(LETTERS, _group_starts(before, after), strict=False):
        takes[i] = gives[j] = letter
    return "".join(takes), "".join(gives)


def _group_starts(before: Shape, after: Shape) -> Iterator[tuple[int, int]]:
    """Yield where groups of dimensions begin that hold the same elements, before and after."""
    i = j = 0
    while i < len(before) and j < len(after):
        yield i, j
        ends = i + 1, j + 1
        while prod(before[i : ends[0]]) != prod(after[j : ends[1]]):
            if prod(before[i : ends[0]]) < prod(after[j : ends[1]]):
                ends = ends[0] + 1, ends[1]
            else:
                ends = ends[0], ends[1] + 1
        i, j = ends


def unknown(calls: Sequence[Seen]) -> list[str]:
    """Return the names of functions without a rule, in order of first sight."""
    return list(dict.fromkeys(s.call.function for s in calls if s.takes and find(s) is None))
