"""What a plan says of each layer: a choice for each call, a state for each weight.

layer 2 'blocks.1'        takes              gives    moved forward  moved backward
layer_norm                I, I, I            I
linear                    R, S(0), S(0)      S(2)     -              1.00 MiB
...
"""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.trace.units import bytes_text, columns

from .layouts import I, Move, State, moves
from .rules import Choice, base_name


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call of a layer: how it is divided, and the bytes that each device sends for it."""

    function: str
    choice: Choice
    forward_bytes: int = 0
    backward_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LayerSharding:
    """How one layer is divided along the axis of shards.

    `weights` are states of its parameters and buffers at rest, by their names in the layer; those
    that are not there are whole.
    """

    name: str
    calls: tuple[PlannedCall, ...]
    weights: Mapping[str, State]

    @property
    def is_divided(self) -> bool:
        """Whether devices do different things; else each runs the layer as it is."""
        return any(call.choice.cut for call in self.calls)

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
    """How the layers of a model are divided among the `num_shards` devices of their stages."""

    num_shards: int
    layers: tuple[LayerSharding, ...]
    unknown: tuple[str, ...] = ()
    """Functions that have no rule, and why layers are whole: there all devices do the same."""

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


def _summary(sharding: Sharding) -> str:
    sent = sum(layer.forward_bytes + layer.backward_bytes for layer in sharding.layers)
    text = (
        f"{len(sharding.layers)} layers on {sharding.num_shards} shards, "
        f"{bytes_text(sent)} sent by each for a micro-batch"
    )
    if sharding.unknown:
        text += f"; done by all alike: {', '.join(sharding.unknown)}"
    return text


def _table(layer: LayerSharding) -> str:
    rows = [
        (
            base_name(call.function),
            ", ".join(map(repr, call.choice.takes)),
            ", ".join(map(repr, call.choice.gives)),
            bytes_text(call.forward_bytes) if call.forward_bytes else "",
            bytes_text(call.backward_bytes) if call.backward_bytes else "",
        )
        for call in layer.calls
    ]
    title = ("operator", "takes", "gives", "sent forward", "backward")
    lines = "\n".join(columns([title, *rows]))
    held = ", ".join(
        f"{name} {state!r}" for name, state in layer.weights.items() if state is not I
    )
    return f"{layer.name}: {held or 'whole weights'}\n{lines}"


def sent_bytes(move: Move, num_bytes: int, count: int) -> float:
    """Return the bytes that each of `count` devices sends, of a value of `num_bytes` in all."""
    share = (count - 1) / count
    return num_bytes * share * _TIMES.get(move, 0) / (count if move is Move.ALL_TO_ALL else 1)


_TIMES = {Move.ALL_REDUCE: 2, Move.ALL_GATHER: 1, Move.REDUCE_SCATTER: 1, Move.ALL_TO_ALL: 1}


def conversion_bytes(
    before: State, after: State, num_bytes: int, count: int, *, has_gradient: bool
) -> tuple[int, int]:
    """Return the bytes that each device sends for a value, and for its gradient."""
    forward, backward = moves(before, after)
    back = sent_bytes(backward, num_bytes, count) if has_gradient else 0
    return round(sent_bytes(forward, num_bytes, count)), round(back)
