"""What each instruction costs: the simulator's only input besides the schedule."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from numbers import Real
from typing import cast

from penstock.errors import ConfigError

Seconds = float | Fraction
"""A time in seconds; ints and Fractions stay exact through the simulator and the breakdown."""
PerStage = Seconds | tuple[Seconds, ...]
"""One number for all stages, or one for each."""
Edges = tuple[tuple[tuple[int, int], Seconds], ...]
PerEdge = Seconds | Mapping[tuple[int, int], Seconds] | Edges
"""One number for all edges, or one for each (producer stage, consumer stage), both ways alike: a
mapping, or its items."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of a stage's forward, backward and recompute of one micro-batch, and of a transfer.

    `backward_input_s` and `backward_weight_s` are those of a backward in two parts; where they are
    not given, each is half of the whole one.  Without `recompute_s` it is `forward_s`.
    `transfer_s` is how long a message travels from one rank to another; a mapping is kept as its
    items, sorted. `send_s` and `receive_s` are for how long the rank of a stage computes nothing
    while it sends a message off to another rank, or takes one in that has come (LogP's overheads,
    Culler et al. 1993). `reduce_s` is what adding up a stage's gradients over replicas takes after
    its last backward, `commit_s` what moving its running statistics takes after its last forward,
    `update_s` what the optimizer takes for a stage where the schedule lets it move the weights.
    `offload_s` and `fetch_s` are for how long a rank computes nothing while what
    it keeps is moved away, or back: on a CPU all of it, elsewhere what does not overlap.

    Raises:
        ConfigError: a cost is negative, no finite number, or neither one nor a tuple.
    """

    forward_s: PerStage
    backward_s: PerStage
    recompute_s: PerStage | None = None
    transfer_s: PerEdge = 0
    send_s: PerStage = 0
    receive_s: PerStage = 0
    reduce_s: PerStage = 0
    commit_s: PerStage = 0
    update_s: PerStage = 0
    backward_input_s: PerStage | None = None
    backward_weight_s: PerStage | None = None
    offload_s: PerStage = 0
    fetch_s: PerStage = 0

    def __post_init__(self) -> None:
        if isinstance(self.transfer_s, Mapping):
            object.__setattr__(self, "transfer_s", tuple(sorted(self.transfer_s.items())))
        for name, value in self._numbers():
            _check_seconds(name, value)

    def _numbers(self) -> Iterator[tuple[str, Seconds]]:
        for cost in fields(self):
            name, given = cost.name, getattr(self, cost.name)
            if given is None and cost.default is None:
                continue
            if name == "transfer_s" and isinstance(given, tuple):
                yield from _of_edges(given)
            elif isinstance(given, tuple):
                yield from ((f"{name}[{stage}]", value) for stage, value in enumerate(given))
            else:
                yield name, given

    def again(self, num_stages: int) -> tuple[float, ...]:
        """Return what a recompute takes on each stage.

        Raises:
            ConfigError: costs are given for another number of stages.
        """
        if self.recompute_s is None:
            return per_stage(self.forward_s, num_stages, "forward_s")
        return per_stage(self.recompute_s, num_stages, "recompute_s")

    def parts(self, num_stages: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return what the two parts of a backward take on each stage: of inputs, of weights.

        Raises:
            ConfigError: costs are given for another number of stages.
        """
        whole = per_stage(self.backward_s, num_stages, "backward_s")
        halves = tuple(s / 2 if isinstance(s, float) else _half(s) for s in whole)
        of_inputs, of_weights = self.backward_input_s, self.backward_weight_s
        return (
            halves if of_inputs is None else per_stage(of_inputs, num_stages, "backward_input_s"),
            halves
            if of_weights is None
            else per_stage(of_weights, num_stages, "backward_weight_s"),
        )


def _of_edges(given: Edges) -> Iterator[tuple[str, Seconds]]:
    for item in given:
        match item:
            case ((int(), int()) as edge, value):
                yield f"transfer_s[{edge}]", value
            case _:
                raise ConfigError(
                    f"transfer_s holds {item!r}: give one number for all edges, or a mapping as "
                    "{(0, 1): seconds}, from the two stages of an edge."
                )


def _check_seconds(name: str, value: object) -> None:
    if not isinstance(value, Real):
        hint = "a tuple, one number for each stage" if isinstance(value, list) else "a number"
        raise ConfigError(f"{name} is {value!r}, a {type(value).__name__}: give {hint}.")
    if value < 0:
        raise ConfigError(f"{name} is {value}: no instruction takes less than 0 seconds.")
    try:
        is_finite = math.isfinite(value)
    except OverflowError:
        raise ConfigError(f"{name} is no number that a float holds: give fewer seconds.") from None
    if not is_finite:
        raise ConfigError(f"{name} is {value}: give a finite number of seconds.")


def _half(seconds: float) -> float:
    half = Fraction(seconds) / 2
    return cast(float, half if half.denominator > 1 else half.numerator)  # exact, and fast


UNIT_COSTS = Costs(forward_s=1, backward_s=2, recompute_s=1)
"""A backward costs two forwards, communication nothing: the costs that laws are stated in."""


def per_stage(costs: PerStage, num_stages: int, name: str) -> tuple[float, ...]:
    """Spell out one cost for each stage.

    Raises:
        ConfigError: `costs` holds another number of stages.
    """
    spelled = costs if isinstance(costs, tuple) else (costs,) * num_stages
    if len(spelled) != num_stages:
        raise ConfigError(
            f"Costs.{name} has {len(spelled)} entries, the schedule has {num_stages} stages: "
            f"give one number for each stage, or one for all."
        )
    return cast(tuple[float, ...], spelled)  # a Fraction does all that a float does here, exactly


def per_edge(costs: PerEdge) -> Callable[[int, int], float]:
    """Return the function (from stage, to stage) -> seconds, both ways alike.

    The function raises ConfigError if `costs` leaves the edge out.
    """

    def look_up(source: int, target: int) -> float:
        edge = (min(source, target), max(source, target))
        if edge not in given:
            raise ConfigError(
                f"Costs.transfer_s has no entry for edge {edge}, along which the schedule sends: "
                f"add it, or give one number for all edges."
            )
        return cast(float, given[edge])

    if isinstance(costs, Mapping | tuple):
        given = dict(costs)
        return look_up
    everywhere = cast(float, costs)
    return lambda source, target: everywhere
