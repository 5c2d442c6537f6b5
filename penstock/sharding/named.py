"""Ready plans by name: each one limits the choices among which the program picks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from penstock.costs.counting.graph import TensorSpec
from penstock.errors import ConfigError

from .layouts import I, Layout, R, S, State
from .letters import base_name
from .program import Allow, Site
from .rules import Choice

_PRODUCTS = ("linear", "addmm", "matmul")
"""Functions whose weights are cut by tensor parallelism."""


Rests = Callable[[TensorSpec, int], Sequence[State]]


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The choices that a ready plan allows."""

    allow: Allow
    """Allowed choices of calls."""
    rests: Rests
    """Allowed states of a weight at rest along an axis."""
    borders: Mapping[State, Sequence[State]] = field(default_factory=lambda: {I: (I,)})
    """Allowed states of values between layers along the first axis, with those of all others."""
    keeps: bool = False
    """True if sliced weights are gathered at the first use in a step, and kept until it ends."""
    gathers: bool = False
    """True if weights that are whole in calls are cut between steps, and gathered for each."""

    def layouts(self, num_axes: int) -> Iterator[Layout]:
        """Yield the allowed layouts of values between layers: alike along all axes but the first,
        as the product of all states of three axes would take hours to plan.
        """
        for first, others in self.borders.items():
            yield from ((first, *(other,) * (num_axes - 1)) for other in others)


# -- what weights may be at rest ------------------------------------------------------------------


def _at_rest(first: str, others: str = "") -> Rests:
    """Allow states along the first axis, and others along later ones; "S" is any slices."""

    def rests(spec: TensorSpec, axis: int) -> Sequence[State]:
        cuts = map(S, range(len(spec.shape)))
        kinds: dict[str, list[State]] = {"I": [I], "R": [R], "S": [*cuts]}
        return [x for kind in (others if axis and others else first) for x in kinds[kind]]

    return rests


def _experts(spec: TensorSpec, axis: int) -> Sequence[State]:
    return [S(0)] if len(spec.shape) > 2 else [R]


# -- what calls may do ----------------------------------------------------------------------------


def _megatron(site: Site, axis: int, choice: Choice) -> bool:
    """Cut weights of products by columns and rows in turn (Shoeybi et al. 2019, section 3), and no
    other call along samples or positions.
    """
    if not any(site.weights):
        return choice.cut == "" or not _cuts_samples(choice)
    return choice.cut == "" if _is_small(site) else _cuts_a_weight(site, choice)


def _sequence(site: Site, axis: int, choice: Choice) -> bool:
    """Cut weights of products, and all else along positions (Korthikanti et al. 2022)."""
    return not _cuts_samples(choice) if _is_small(site) else _cuts_a_weight(site, choice)


def _grid(site: Site, axis: int, choice: Choice, *, first: int = 1) -> bool:
    """Cut samples or positions along the axes before `first`, weights of products along others
    (Narayanan et al. 2021), and calls between products as fits.
    """
    return _cuts_a_weight(site, choice) == (axis >= first and not _is_small(site))


def _is_small(site: Site) -> bool:
    """Tell if a call's weights stay whole: it is no product, or no choice cuts them."""
    is_product = base_name(site.call.function) in _PRODUCTS
    choices = (choice for of_axis in site.by_axis for choice in of_axis)
    return not is_product or not any(_cuts_a_weight(site, choice) for choice in choices)


def _data(site: Site, axis: int, choice: Choice) -> bool:
    return not _cuts_a_weight(site, choice)


def _expert(site: Site, axis: int, choice: Choice) -> bool:
    """Cut samples, and experts where there are some (Lepikhin et al. 2020)."""
    return not any(isinstance(state, S) and state != S(0) for state in _of_weights(site, choice))


def _cuts_a_weight(site: Site, choice: Choice) -> bool:
    return any(isinstance(state, S) for state in _of_weights(site, choice))


def _of_weights(site: Site, choice: Choice) -> list[State]:
    pairs = zip(choice.takes, site.weights, strict=True)
    return [state for state, is_weight in pairs if is_weight]


def _cuts_samples(choice: Choice) -> bool:
    """Tell if the first dimension of any argument or result is cut."""
    return S(0) in (*choice.takes, *choice.gives)


_POSITIONS: Mapping[State, Sequence[State]] = {S(1): (S(1),)}
_SAMPLES: Mapping[State, Sequence[State]] = {S(0): (S(0),)}
_ANY: Mapping[State, Sequence[State]] = {I: (I,), S(0): (I, S(0), S(1)), S(1): (S(1),)}
_summed_first = _at_rest("R", "RIS")
READY: dict[str, Ready] = {
    "auto": Ready(allow=lambda *_: True, rests=_at_rest("RIS"), borders=_ANY),
    "megatron": Ready(allow=_megatron, rests=_at_rest("IS")),
    "sequence": Ready(allow=_sequence, rests=_at_rest("RIS"), borders=_POSITIONS),
    "grid": Ready(allow=_grid, rests=_summed_first, borders={S(0): (I, S(0), S(1))}),
    "grid+sequence": Ready(allow=_grid, rests=_summed_first, borders={S(0): (S(1),)}),
    "context": Ready(allow=_data, rests=_at_rest("R"), borders=_POSITIONS),
    "context+sequence": Ready(allow=_grid, rests=_summed_first, borders=_POSITIONS),
    "data+context": Ready(allow=_data, rests=_at_rest("R"), borders={S(0): (S(1),)}),
    "data+context+sequence": Ready(
        allow=partial(_grid, first=2), rests=_at_rest("R", "RIS"), borders={S(0): (S(1),)}
    ),
    "expert": Ready(allow=_expert, rests=_experts, borders=_SAMPLES),
    "data": Ready(allow=_data, rests=_at_rest("R"), borders=_SAMPLES),
    "zero2": Ready(allow=_data, rests=_at_rest("S"), borders=_SAMPLES, keeps=True),
    "zero3": Ready(allow=_data, rests=_at_rest("S"), borders=_SAMPLES),
}
"""Plans by name, as `sharding=` takes them."""


def ready_plan(name: str) -> Ready:
    """Return the ready plan of this name; a ConfigError if there is none.

    "+zero1" after any name cuts weights between steps; "zero1" alone is "data+zero1".
    """
    base = name.removesuffix("+zero1") if name != "zero1" else "data"
    if base not in READY:
        raise ConfigError(
            f"sharding={name!r}: ready plans are {', '.join(map(repr, READY))} and 'zero1'; "
            "'megatron+zero1' and the like cut weights between steps, too"
        )
    return replace(READY[base], gathers=name != base)
