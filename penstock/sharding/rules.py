"""Rules: the ways to divide the calls of torch's functions along one axis of a mesh.

A rule names the dimensions of the arguments and results of a call by letters, as an einsum does:

    linear    "abk,nk,n->abn"    cut along b:  S(1), R, R    -> S(1)
                                 cut along n:  R, S(0), S(0) -> S(2)    by columns
                                 cut along k:  S(2), S(1), P -> P       by rows: one adds the bias

One letter is cut at a time.  A tensor that has the letter is a shard.  An argument that lacks it
is whole on each device, and its gradient is a partial sum.  A result without it is a partial sum.
Every call can also run replicated.  A function without a rule runs only so; the plan names it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from .layouts import I, Layout, P, R, S, Shape, State
from .letters import WHOLE, Rule, Seen
from .operators import find


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
