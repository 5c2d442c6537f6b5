"""Costs: the seconds of each kind of instruction, the simulator's input besides the schedule."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from numbers import Real
from typing import TypeVar, cast

from penstock.errors import ConfigError

Number = TypeVar("Number", int, float)
Seconds = float | Fraction
"""A time in seconds; ints and Fractions stay exact through the simulator and the breakdown."""
PerStage = Seconds | tuple[Seconds, ...]
"""One number for all stages, or one for each."""
Edges = tuple[tuple[tuple[int, int], Seconds], ...]
"""The items of a mapping of edges, sorted."""
PerEdge = Seconds | Mapping[tuple[int, int], Seconds] | Edges
"""One number for all edges, or one for each (producer stage, consumer stage), for both ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of a stage's instructions for one micro-batch, and of a transfer.

    `send_s` and `receive_s` are LogP's overheads (Culler et al. 1993).

    Raises:
        ConfigError: a cost is negative, no finite number, or neither one nor a tuple.
    """

    forward_s: PerStage
    backward_s: PerStage
    """A whole backward."""
    recompute_s: PerStage | None = None
    """None: as long as a forward."""
    transfer_s: PerEdge = 0
    """The travel time of a message between two ranks; a mapping is kept as its sorted items."""
    send_s: PerStage = 0
    """The time for which a rank computes nothing while it sends a message to another rank."""
    receive_s: PerStage = 0
    """The time for which a rank computes nothing while it takes in a message that has come."""
    reduce_s: PerStage = 0
    """The sum of a stage's gradients over replicas, after its last backward."""
    commit_s: PerStage = 0
    """The update of a stage's running statistics, after its last forward."""
    update_s: PerStage = 0
    """The optimizer's step of a stage, in schedules that update weights."""
    backward_input_s: PerStage | None = None
    """The first part of a backward in two parts; None: half of the whole one."""
    backward_weight_s: PerStage | None = None
    """The second part; None: half of the whole one."""
    offload_s: PerStage = 0
    """The time for which a rank computes nothing during an Offload: on a CPU all of it, elsewhere
    the part that does not overlap."""
    fetch_s: PerStage = 0
    """The same during a Fetch."""

    def __post_init__(self) -> None:
        if isinstance(self.transfer_s, Mapping):
            object.__setattr__(self, "transfer_s", tuple(sorted(self.transfer_s.items())))
        for cost in fields(self):
            name, value = cost.name, getattr(self, cost.name)
            numbers: Iterable[tuple[str, object]] = [(name, value)]
            if value is None and cost.default is None:
                numbers = ()
            elif name == "transfer_s" and isinstance(value, tuple):
                numbers = _of_edges(value)
            elif isinstance(value, tuple):
                numbers = ((f"{name}[{stage}]", seconds) for stage, seconds in enumerate(value))
            for label, seconds in numbers:
                _check_seconds(label, seconds)

    def again(self, num_stages: int) -> tuple[float, ...]:
        """Return the seconds of a recompute on each stage.

        Raises:
            ConfigError: costs are given for another number of stages.
        """
        if self.recompute_s is None:
            return per_stage(self.forward_s, num_stages, "forward_s")
        return per_stage(self.recompute_s, num_stages, "recompute_s")

    def parts(self, num_stages: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the seconds of both parts of a backward on each stage: inputs, weights.

        Raises:
            ConfigError: costs are given for another number of stages.
        """
        whole = per_stage(self.backward_s, num_stages, "backward_s")
        # half a float is a float, any other half exact: an int if possible, as they are faster
        halves = [s / 2 if isinstance(s, float) else Fraction(s) / 2 for s in whole]
        halves = [int(s) if not isinstance(s, float) and s == int(s) else s for s in halves]
        inputs, weights = (
            halves if part is None else per_stage(part, num_stages, name)
            for name, part in (
                ("backward_input_s", self.backward_input_s),
                ("backward_weight_s", self.backward_weight_s),
            )
        )
        return tuple(inputs), tuple(weights)


def _of_edges(edges: Edges) -> Iterator[tuple[str, Seconds]]:
    for item in edges:
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


UNIT_COSTS = Costs(forward_s=1, backward_s=2, recompute_s=1)
"""Costs for stating laws: a backward costs two forwards, communication nothing."""


def per_stage(costs: PerStage, num_stages: int, name: str) -> tuple[float, ...]:
    """Return one cost for each stage; a ConfigError if `costs` holds another number of stages."""
    # a Fraction does all that a float does here, exactly
    return one_each(cast(float | tuple[float, ...], costs), num_stages, f"Costs.{name}")


def one_each(
    value: Number | tuple[Number, ...], count: int, name: str, noun: str = "stage"
) -> tuple[Number, ...]:
    """Return one number for each of `count` `noun`s; a ConfigError for another number."""
    numbers = value if isinstance(value, tuple) else (value,) * count
    if len(numbers) != count:
        raise ConfigError(
            f"{name} has {len(numbers)} entries, the schedule has {count} {noun}s: give one "
            f"number for each {noun}, or one for all"
        )
    return numbers


def per_edge(costs: PerEdge) -> Callable[[int, int], float]:
    """Return (from stage, to stage) -> seconds, both ways alike; it refuses unknown edges."""

    def look_up(source: int, target: int) -> float:
        edge = (min(source, target), max(source, target))
        if edge not in of_edges:
            raise ConfigError(
                f"Costs.transfer_s has no entry for edge {edge}, along which the schedule sends: "
                f"add it, or give one number for all edges."
            )
        return cast(float, of_edges[edge])

    if isinstance(costs, Mapping | tuple):
        of_edges = dict(costs)
        return look_up
    everywhere = cast(float, costs)
    return lambda source, target: everywhere
