"""The plan of operators: for each layer, a choice for each call and a layout for each weight.

layer 2 'blocks.1'        takes              gives    moved forward  moved backward
layer_norm                I, I, I            I
linear                    R, S(0), S(0)      S(2)     -              1.00 MiB
...
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from penstock.trace.units import bytes_text, columns, time_text

from .layouts import I, Layout, Move, S, layout_text, moves_of
from .letters import base_name
from .rules import Choice

BUCKET_BYTES = 25 << 20
"""Least bytes of the weights whose gradients are summed, or slices gathered, at once in a step."""


@dataclass(frozen=True, slots=True)
class Instead:
    """The next best way to divide a call, and the seconds it adds to a micro-batch."""

    choices: tuple[Choice, ...]
    more_s: float


@dataclass(frozen=True)
class PlannedCall:
    """One call of a layer, with a choice along each axis."""

    function: str
    choices: tuple[Choice, ...]
    forward_bytes: int = 0
    """Bytes that each device sends for it in a forward."""
    backward_bytes: int = 0
    """Bytes that each device sends for it in a backward."""
    changes: tuple[int, ...] = ()
    """Places, among its arguments, of the tensors that it changes in place."""
    instead: Instead | None = None

    @property
    def cuts(self) -> tuple[str, ...]:
        """The letter that is cut along each axis; "" where the call is replicated."""
        return tuple(choice.cut for choice in self.choices)

    @cached_property
    def takes(self) -> tuple[Layout, ...]:
        return tuple(zip(*(choice.takes for choice in self.choices), strict=True))

    @cached_property
    def gives(self) -> tuple[Layout, ...]:
        return tuple(zip(*(choice.gives for choice in self.choices), strict=True))


@dataclass(frozen=True, slots=True)
class LayerSharding:
    """The division of one layer along the axes of its stage's mesh."""

    name: str
    calls: tuple[PlannedCall, ...]
    weights: Mapping[str, Layout]
    """Layouts of parameters at rest, by their names in the layer; all others are whole."""
    leaving: Mapping[tuple[int, int], Layout] = field(default_factory=dict)
    """Layouts of values for other layers that are not whole, by (call, place of the result)."""
    num_entering: int = 0
    """Number of values that enter the layer in a layout that is not whole."""
    again: frozenset[str] = frozenset()
    """Sliced weights that the backward needs: they are freed after the forward, gathered again."""
    multiple: int = 1
    """Batches of a multiple of this cross between unlike meshes in even slices, others whole."""
    gives_slices: bool = False
    """True for a layer on one device that sends slices to the next stage."""

    @property
    def is_divided(self) -> bool:
        """True if devices compute, hold or receive different parts; else each runs it whole."""
        cuts = any(choice.cut for call in self.calls for choice in call.choices)
        holds = any(isinstance(state, S) for own in self.weights.values() for state in own)
        return cuts or holds or bool(self.leaving) or self.num_entering > 0

    @property
    def forward_bytes(self) -> int:
        """Bytes that each device sends in a forward."""
        return sum(call.forward_bytes for call in self.calls)

    @property
    def backward_bytes(self) -> int:
        """Bytes that each device sends in a backward."""
        return sum(call.backward_bytes for call in self.calls)


@dataclass(frozen=True, slots=True)
class Sharding:
    """The division of a model's layers among the devices of their stages."""

    meshes: tuple[tuple[int, ...], ...]
    """Meshes of the stages, each once, as the lengths of their axes."""
    layers: tuple[LayerSharding, ...]
    unknown: tuple[str, ...] = ()
    """Functions without a rule, and reasons why layers are whole: these run replicated."""
    keeps: bool = False
    """True if gathered weights are kept until the step ends."""
    gathers: bool = False
    """True if weights are cut between steps along shards and replicas, and gathered for each."""

    def __str__(self) -> str:
        """Return a table of calls and weights of each layer that differs from earlier ones."""
        parts = [_summary(self)]
        seen: dict[object, str] = {}
        for layer in self.layers:
            facts = layer.calls, tuple(layer.weights.items())
            first = seen.setdefault(facts, layer.name)
            if first != layer.name:
                parts.append(f"{layer.name}: as {first}")
            else:
                parts.append(_table(layer))
        return "\n".join(parts)


def _summary(sharding: Sharding) -> str:
    sent = sum(layer.forward_bytes + layer.backward_bytes for layer in sharding.layers)
    meshes = " or ".join(" x ".join(map(str, mesh)) for mesh in sharding.meshes)  # of stages
    text = (
        f"{len(sharding.layers)} layers on {meshes} shards, "
        f"{bytes_text(sent)} sent by each for a micro-batch"
    )
    if sharding.gathers:
        text += "; weights are cut between steps along replicas and shards, and gathered for each"
    if sharding.unknown:
        text += f"; done by all alike: {', '.join(sharding.unknown)}"
    return text


def _table(layer: LayerSharding) -> str:
    rows: list[tuple[str, ...]] = [
        (
            base_name(call.function),
            *_layouts(call),
            bytes_text(call.forward_bytes) if call.forward_bytes else "",
            bytes_text(call.backward_bytes) if call.backward_bytes else "",
            *_instead(call),
        )
        for call in layer.calls
    ]
    title: tuple[str, ...] = ("operator", "takes", "gives", "sent forward", "backward")
    title += ("next best", "longer by")
    if not any(call.instead for call in layer.calls):
        rows, title = [row[:5] for row in rows], title[:5]
    lines = "\n".join(columns([title, *rows]))
    held = ", ".join(
        f"{name} {layout_text(layout)}"
        for name, layout in layer.weights.items()
        if set(layout) != {I}
    )
    return f"{layer.name}: {held or 'whole weights'}\n{lines}"


def _layouts(call: PlannedCall) -> tuple[str, str]:
    takes, gives = (", ".join(map(layout_text, own)) for own in (call.takes, call.gives))
    return takes, gives


def _instead(call: PlannedCall) -> tuple[str, str]:
    if call.instead is None:
        return "", ""
    other = PlannedCall(call.function, call.instead.choices)
    return " -> ".join(_layouts(other)), time_text(max(call.instead.more_s, 0.0))


def sent_bytes(move: Move, num_bytes: int, count: int) -> float:
    """Return the bytes that each of `count` devices sends for a value of `num_bytes`."""
    share = (count - 1) / count
    return num_bytes * share * _TIMES.get(move, 0) / (count if move is Move.ALL_TO_ALL else 1)


_TIMES = {Move.ALL_REDUCE: 2, Move.ALL_GATHER: 1, Move.REDUCE_SCATTER: 1, Move.ALL_TO_ALL: 1}
"""Passes over the value in a ring; other moves send nothing."""


def conversion_bytes(
    before: Layout, after: Layout, num_bytes: int, mesh: Sequence[int], *, has_gradient: bool
) -> tuple[int, int]:
    """Return the bytes that each device sends for a value, and for its gradient."""
    sent = [0.0, 0.0]
    for axis, others, both in moves_of(before, after):
        own_bytes = num_bytes // prod(mesh[n] for n in others)
        for way, move in enumerate(both[: 1 + has_gradient]):
            sent[way] += sent_bytes(move, own_bytes, mesh[axis])
    return round(sent[0]), round(sent[1])
