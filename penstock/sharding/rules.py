"""Rules: the ways to divide the calls of torch's functions along one axis of a mesh.

A rule names the dimensions of the arguments and results of a call by letters, as an einsum does:

    linear    "abk,nk,n->abn"    cut along b:  S(1), R, R    -> S(1)
                                 cut along n:  R, S(0), S(0) -> S(2)    by columns
                                 cut along k:  S(2), S(1), P -> P       by rows: one adds the bias

One letter is cut at a time.  A tensor that has the letter is a shard.  An argument that lacks it
is whole on each device, and its gradient is a partial sum.  A result without it is a partial sum.
Every call can also run replicated.  A function without a rule runs only so; the plan names it.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from math import prod
from typing import Any

from penstock.costs.counting.graph import Call, Graph, Ref
from penstock.costs.counting.opaque_modules import OPAQUE

from .layouts import I, Layout, P, R, S, Shape, State

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


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to divide a call along an axis: a state for each argument and result."""

    takes: tuple[State, ...]
    gives: tuple[State, ...]
    cut: str = ""
    """The letter that is cut; "" where the call is replicated."""
    piece: int = 1
    """Slices of the first tensor with the letter are multiples of this length."""


ALIKE = Choice((), ())
"""The choice of a call that is in no plan: it runs replicated."""


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


FindRule = Callable[[Seen], Rule | None]
_RULES: dict[str, FindRule] = {}


def rule(*names: str) -> Callable[[FindRule], FindRule]:
    """Register a function that finds the rule of the functions with these names."""

    def register(find: FindRule) -> FindRule:
        _RULES.update(dict.fromkeys(names, find))
        return find

    return register


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
    """Return the choice that cuts a call along one letter."""
    gives = tuple(S(result.index(name)) if name in result else P for result in letters.gives)
    takes: list[State] = [S(own.index(name)) if name in own else R for own in letters.takes]
    if letters.bias is not None and name not in letters.takes[letters.bias] and P in gives:
        takes[letters.bias] = P
    return Choice(tuple(takes), gives, name, dict(letters.pieces).get(name, 1))


def divisions(seen: Seen, mesh: Sequence[int]) -> tuple[tuple[Choice, ...], ...]:
    """Return all ways to divide a call along each axis of a mesh."""
    return tuple(choices(seen, count) for count in mesh)


def together(
    seen: Seen, by_axis: Sequence[Sequence[Choice]], mesh: tuple[int, ...]
) -> list[tuple[Choice, ...]]:
    """Return all combinations of a choice per axis that leave each device something."""
    return [combined for combined in product(*by_axis) if _is_enough(seen, combined, mesh)]


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
    takes = zip(seen.takes, zip(*(choice.takes for choice in by_axis), strict=True), strict=True)
    gives = zip(seen.gives, zip(*(choice.gives for choice in by_axis), strict=True), strict=True)
    tensors = [*takes, *gives]
    if not all(fits(shape, layout, mesh) for shape, layout in tensors):
        return False
    for axis, choice in enumerate(by_axis):
        # axes that cut the same letter divide its slices further
        parts = prod(n for n, other in zip(mesh, by_axis, strict=True) if other.cut == choice.cut)
        lengths = (shape[x.dim] for shape, layout in tensors if isinstance(x := layout[axis], S))
        if next(lengths, parts * choice.piece) < parts * choice.piece:
            return False
    return True


def find(seen: Seen) -> Rule | None:
    """Return the rule of a call; None where there is none, or one tensor is given twice.

    Rules speak of tensors that differ.
    """
    if len(seen.call.uses) > len(seen.takes):
        return None
    opaque = OPAQUE.get(seen.call.function)
    if opaque is not None:
        return Rule(takes=opaque.letters, gives=(opaque.gives,))
    finder = _RULES.get(base_name(seen.call.function))
    return None if finder is None else finder(seen)


def unknown(calls: Sequence[Seen]) -> list[str]:
    """Return the names of functions without a rule, in order of first sight."""
    return list(dict.fromkeys(s.call.function for s in calls if s.takes and find(s) is None))


# -- rules in letters -----------------------------------------------------------------------------


def spelled(names: str, notation: str, *, is_linear: bool = False) -> None:
    """Register one notation of letters, as `spell` reads it, for functions with these names."""
    rule(*names.split())(partial(spell, notation=notation, is_linear=is_linear))


def spell(
    seen: Seen,
    notation: str,
    *,
    pieces: tuple[tuple[str, int], ...] = (),
    is_linear: bool = False,
) -> Rule | None:
    """Return the rule that a notation says; None where the call has other tensors as arguments.

        "input *k, weight nk, +bias n -> *n"

    The notation has the arguments in the order of the signature; those with letters are tensors.
    `*` stands for the leading dimensions of the first tensor, `_` for its others, which are whole.
    `+` marks the argument that is added to a product.
    """
    arguments, _, gives = notation.partition("->")
    shapes = dict(zip(seen.call.takes, seen.takes, strict=True))
    takes: dict[int, str] = {}
    bias = None
    rest = 0
    for place, argument in enumerate(arguments.split(",")):
        name, has_letters, letters = argument.lstrip().partition(" ")
        value = seen.argument(place, name.lstrip("+"))
        if not has_letters or not isinstance(value, Ref):
            continue
        letters = letters.strip()
        if place == 0:
            rest = len(shapes[value.tensor]) - len(letters.replace("*", "").replace("_", ""))
        if name.startswith("+"):
            bias = seen.call.takes.index(value.tensor)
        takes[value.tensor] = _unfolded(letters, rest)
    if takes.keys() != shapes.keys():
        return None
    return Rule(
        takes=tuple(takes[tensor] for tensor in shapes),
        gives=(_unfolded(gives.strip(), rest),) * len(seen.gives),
        bias=bias,
        pieces=pieces,
        is_linear=is_linear,
    )


def _unfolded(letters: str, rest: int) -> str:
    return letters.replace("*", LETTERS[:rest]).replace("_", WHOLE * rest)


def named(shape: Shape, whole: Collection[int] = (), instead: str = WHOLE) -> str:
    """Name all dimensions but those that are needed whole, which are called `instead`."""
    letters = LETTERS[: len(shape)]
    return "".join(instead if d in whole else x for d, x in enumerate(letters))


def ends(shape: Shape, letters: str, result: Shape) -> str:
    """Name the dimensions of a tensor that broadcasts to `result`, whose names are `letters`."""
    first = len(result) - len(shape)
    lengths = zip(shape, result[first:], letters[first:], strict=True)
    return "".join(x if length == full else WHOLE for length, full, x in lengths)


# -- element by element ---------------------------------------------------------------------------


def elementwise(seen: Seen) -> Rule:
    """Return the rule of a function that broadcasts its arguments and treats elements alike."""
    (result,) = {*seen.gives}
    letters = named(result)
    takes = tuple(ends(shape, letters, result) for shape in seen.takes)
    return Rule(takes=takes, gives=(letters,) * len(seen.gives))


rule(
    *("gelu", "relu", "silu", "tanh", "sigmoid", "exp", "log", "sqrt", "rsqrt", "pow", "abs"),
    *("where", "lt", "gt", "le", "ge", "eq", "ne", "clamp", "square", "softplus", "erf"),
    *("masked_fill", "float", "long", "bool", "half", "bfloat16", "double", "int", "short"),
    *("exp2", "log2", "and", "or", "xor", "invert", "isinf", "isnan", "isfinite", "nan_to_num"),
    *("rsub", "rpow", "floordiv", "floor_divide", "mod", "remainder", "fmod", "made_like"),
    *("hardtanh", "relu6", "leaky_relu", "elu", "selu", "celu", "hardswish", "hardsigmoid"),
    *("mish", "logsigmoid", "softsign", "threshold", "maximum", "minimum", "sign", "sin", "cos"),
    *("log1p", "expm1", "reciprocal", "floor", "ceil", "round", "logical_and", "logical_or"),
    *("logical_not",),
)(elementwise)


@rule("add", "sub", "mul", "div")
def _arithmetic(seen: Seen) -> Rule:
    """Sums of tensors of one shape are linear, and so is scaling by a number.

    A number divided by a tensor is not linear, nor is a quotient that is rounded.
    """
    call = seen.call
    if base_name(call.function) in ("add", "sub"):
        is_linear = len(seen.takes) == 2 and len(set(seen.takes)) == 1
    else:
        divides = "rtruediv" in call.function or "rdiv" in call.function
        starts = isinstance(call.arguments[0], Ref) if call.arguments else False
        is_linear = len(seen.takes) == 1 and starts and not divides and not call.options
    return replace(elementwise(seen), is_linear=is_linear)


spelled("neg contiguous clone dropout detach positive", "input * -> *", is_linear=True)
