"""What a plan says of each layer: a choice for each call, a state for each weight.

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

from .layouts import I, Layout, Move, S, layout_text, moves, steps
from .rules import Choice, base_name


@dataclass(frozen=True, slots=True)
class Instead:
    """Another way to divide a call, and by how many seconds a micro-batch then takes longer."""

    choices: tuple[Choice, ...]
    more_s: float


@dataclass(frozen=True)
class PlannedCall:
    """One call of a layer: how it is divided along each axis, and the bytes that each device sends
    for it; `changes` are the places of what it changes in place, of what it takes, and `instead`
    is the next best way.
    """

    function: str
    choices: tuple[Choice, ...]
    forward_bytes: int = 0
    backward_bytes: int = 0
    changes: tuple[int, ...] = ()
    instead: Instead | None = None

    @property
    def cuts(self) -> tuple[str, ...]:
        """What is cut along each axis; "" where all devices do the same."""
        return tuple(choice.cut for choice in self.choices)

    @cached_property
    def takes(self) -> tuple[Layout, ...]:
        """The layout of each tensor that it takes."""
        return tuple(zip(*(choice.takes for choice in self.choices), strict=True))

    @cached_property
    def gives(self) -> tuple[Layout, ...]:
        """The layout of each tensor that it gives."""
        return tuple(zip(*(choice.gives for choice in self.choices), strict=True))


@dataclass(frozen=True, slots=True)
class LayerSharding:
    """How one layer is divided along the axes of its stage's mesh.

    `weights` are layouts of its parameters at rest, by their names in the layer; those that are
    not there are whole.  `leaving` are layouts of what other layers are given, by (call, place
    among what it gives), where they are not whole; `num_entering` counts what this layer is given
    so.  `again` are weights in slices that the backward wants too: what they are converted to is
    freed after the forward.

    Between stages of unlike meshes slices are even: samples that are no `multiple` cross whole.
    `gives_slices` says of a layer on one device that the stage after it is given slices.
    """

    name: str
    calls: tuple[PlannedCall, ...]
    weights: Mapping[str, Layout]
    leaving: Mapping[tuple[int, int], Layout] = field(default_factory=dict)
    num_entering: int = 0
    again: frozenset[str] = frozenset()
    multiple: int = 1
    gives_slices: bool = False

    @property
    def is_divided(self) -> bool:
        """Whether devices do, hold or are given different things; else each runs the layer as it
        is.
        """
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
    """How the layers of a model are divided among the devices of their stages; `meshes` are the
    lengths of the axes along which, each once, in the order of stages.
    """

    meshes: tuple[tuple[int, ...], ...]
    layers: tuple[LayerSharding, ...]
    unknown: tuple[str, ...] = ()
    """Functions that have no rule, and why layers are whole: there all devices do the same."""
    keeps: bool = False
    """Whether what weights are converted to is kept until the step ends."""
    gathers: bool = False
    """Whether weights are cut between steps, along shards and replicas, where calls have the
    whole: gathered once a step.
    """

    def __str__(self) -> str:
        """Print the layers that differ, each with its calls and its weights."""
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


def meshes_text(meshes: Sequence[Sequence[int]]) -> str:
    """Write the lengths of axes: "2 x 2", or "1 or 2 x 2" where stages have others."""
    return " or ".join(" x ".join(map(str, mesh)) for mesh in meshes)


def _summary(sharding: Sharding) -> str:
    sent = sum(layer.forward_bytes + layer.backward_bytes for layer in sharding.layers)
    text = (
        f"{len(sharding.layers)} layers on {meshes_text(sharding.meshes)} shards, "
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
    """Return the bytes that each of `count` devices sends, of a value of `num_bytes` in all."""
    share = (count - 1) / count
    return num_bytes * share * _TIMES.get(move, 0) / (count if move is Move.ALL_TO_ALL else 1)


_TIMES = {Move.ALL_REDUCE: 2, Move.ALL_GATHER: 1, Move.REDUCE_SCATTER: 1, Move.ALL_TO_ALL: 1}


def conversion_bytes(
    before: Layout, after: Layout, num_bytes: int, mesh: Sequence[int], *, has_gradient: bool
) -> tuple[int, int]:
    """Return the bytes that each device sends for a value, and for its gradient."""
    sent, current = [0.0, 0.0], list(before)
    for axis, old, new in steps(before, after):
        others = (n for n, state in enumerate(current) if n != axis and isinstance(state, S))
        own_bytes = num_bytes // prod(mesh[n] for n in others)
        both = moves(old, new)[: 1 + has_gradient]
        sent = [
            a + sent_bytes(move, own_bytes, mesh[axis])
            for a, move in zip(sent, (*both, Move.NONE), strict=False)
        ]
        current[axis] = new
    return round(sent[0]), round(sent[1])
