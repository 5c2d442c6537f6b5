"""What the layers of a model cost: measured on this machine, or counted on meta tensors.

Layers that are alike are there once, as a `LayerKind`; `AtSize` says which layer is of which kind.
Everything is for one micro-batch of so many samples; `Profile.sizes` has one entry for each size
that was looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, UnreadableError
from penstock.plain_values import from_json, path_of, to_json

from .layer_facts import LayerFacts, first_difference


class Part(Enum):
    """The part of a step that an operator belongs to."""

    FORWARD = "forward"
    INPUT = "input"
    """Of a backward, what gives gradients of the layer's inputs."""
    WEIGHT = "weight"
    """Of a backward, what only gives gradients of its weights."""


PRODUCTS = ("gemm", "attention", "conv1x1", "conv3x3", "conv")
"""Classes that are priced by FLOPs and bytes, the slower of the two."""
MOVES = ("norm", "pool", "reduce", "elementwise", "embedding", "copy")
"""Classes that are priced by bytes."""
CLASSES = (*PRODUCTS, *MOVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """`count` operators of one class and one size, in one part of a layer's work.

    `num_bytes` are read and written ones of each.  `dims` are rows, columns and depth of a matrix
    product, or of the one that a convolution amounts to; `batch` how many of these are done at
    once.  Of other classes they are empty.
    """

    name: str
    """Of `CLASSES`."""
    part: Part
    flops: int
    num_bytes: int
    dims: tuple[int, ...] = ()
    batch: int = 1
    dtype: str = "float32"
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """Seconds of one layer for one micro-batch, measured (medians over repeats) or by a roofline.

    `backward_s` is a whole backward; `input_s` and `weight_s` are one in two parts, which cost
    a little more together.  In measured ones gradients of weights are added to others.
    `spread` is half the distance between the quartiles of forward plus backward, as a share of
    their median.
    """

    forward_s: float
    recompute_s: float
    backward_s: float
    input_s: float
    weight_s: float
    spread: float = 0.0
    is_measured: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What a layer does with one micro-batch, and what it keeps for its backward.

    `inner_bytes` is what it saves beside the values that come in and go out, each storage once;
    `left_bytes` what the input part of a divided backward leaves to the other one, at most.
    """

    operators: tuple[Operator, ...]
    inner_bytes: int
    left_bytes: int
    draws: bool = False
    """Whether it draws random numbers."""
    seconds: LayerSeconds | None = None
    """What was measured, or what a device's prices are; None where it was only counted."""
    busy_seconds: LayerSeconds | None = None
    """The same with all cores of the host busy with such work."""

    @property
    def num_forward(self) -> int:
        """Operators of its forward."""
        return sum(x.count for x in self.operators if x.part is Part.FORWARD)

    @property
    def num_backward(self) -> int:
        """Operators of a whole backward."""
        return sum(x.count for x in self.operators) - self.num_forward


@dataclass(frozen=True, slots=True)
class Value:
    """What a layer gives to later ones: a tensor, or several together.

    `producer` is the layer's number, -1 for the model's input; `consumers` are in order.  The last
    layer's value has none: it goes to the loss.  `storage` is equal for values that share memory.
    With `has_gradient` a gradient of as many bytes comes back.  With `is_weight` it is a
    parameter that later layers use too; the first of its layers has it.
    """

    producer: int
    consumers: tuple[int, ...]
    num_bytes: int
    storage: int
    has_gradient: bool = True
    is_weight: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AtSize:
    """A model's layers for micro-batches of one size.

    `kind_of[n]` is the place of layer n's kind in `kinds`, `saved[n]` are the places in `values`
    of what it saves for its backward of what comes in and goes out.  `loss` is what the loss
    function costs, where it was given, `loss_saved` what it saves of the model's output, and
    `target_bytes` are those of its targets: the stage that computes it keeps them from the forward
    on, as the first stage keeps the model's input.
    """

    microbatch_size: int
    kinds: tuple[LayerKind, ...]
    kind_of: tuple[int, ...]
    values: tuple[Value, ...]
    saved: tuple[tuple[int, ...], ...]
    loss: LayerKind | None = None
    loss_saved: tuple[int, ...] = ()
    target_bytes: int = 0

    def layer(self, number: int) -> LayerKind:
        """Return what is known of a layer."""
        return self.kinds[self.kind_of[number]]

    def seconds(self, number: int) -> LayerSeconds:
        """Return the seconds of a layer, where they are known."""
        found = self.layer(number).seconds
        assert found is not None, "it was measured, or is priced for a device"
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Bytes of a layer's parameters; one that layers share is counted in the first of them."""

    parameter_bytes: int
    gradient_bytes: int
    """Of those that want gradients."""
    optimizer_bytes: int
    """What the optimizer keeps for them."""
    buffer_bytes: int = 0
    num_norms: int = 0
    """BatchNorms, whose running statistics move once in a step."""
    partial_bytes: int = 0
    """Of gradients of which each shard has a part: they are summed once in a step."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        weights = self.parameter_bytes + self.buffer_bytes
        return weights + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What the layers of a model cost, for micro-batches of some sizes.

    `spans` are (start, end) of layers that are to be on one stage.  `measured_on` names the device
    that `LayerKind.seconds` are of, with `threads` for each stage; None where all was counted.

    Raises:
        ConfigError: parts of it do not fit together.
    """

    name: str
    layers: tuple[LayerFacts, ...]
    spans: tuple[tuple[int, int], ...]
    weights: tuple[LayerWeights, ...]
    sizes: tuple[AtSize, ...]
    measured_on: str | None = None
    threads: int = 1
    environment: tuple[tuple[str, str], ...] = field(default=())
    """Names and values: versions, machine, when it was made."""
    operators: Any = field(default=None, compare=False, repr=False)
    """`costs.graph.Operators` of the model, by which stages may be divided; no file holds them."""

    def __post_init__(self) -> None:
        num_layers = len(self.layers)
        if not num_layers or not self.sizes:
            raise ConfigError("a profile needs at least one layer, and one micro-batch size")
        for what, of_layers in (
            ("weights", self.weights),
            *((f"sizes[{n}].kind_of", each.kind_of) for n, each in enumerate(self.sizes)),
            *((f"sizes[{n}].saved", each.saved) for n, each in enumerate(self.sizes)),
        ):
            if len(of_layers) != num_layers:
                raise ConfigError(
                    f"a profile of {num_layers} layers has {what} for {len(of_layers)}; give one "
                    "entry for each layer"
                )
        sizes = [each.microbatch_size for each in self.sizes]
        if sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ConfigError(
                f"the micro-batch sizes of a profile are {sizes}; give each once, in order, from 1"
            )
        for n, each in enumerate(self.sizes):
            self._check(n, each)
        wrong = _below_zero(self.weights, "weights") or _below_zero(self.sizes, "sizes")
        if wrong:
            raise ConfigError(f"{wrong} in a profile; it must be at least 0")

    def _check(self, n: int, each: AtSize) -> None:
        places: Sequence[tuple[str, Sequence[int], int]] = (
            ("kind_of", each.kind_of, len(each.kinds)),
            ("saved", [v for of_layer in each.saved for v in of_layer], len(each.values)),
            ("loss_saved", each.loss_saved, len(each.values)),
        )
        for what, numbers, count in places:
            wrong = [x for x in numbers if not 0 <= x < count]
            if wrong:
                raise ConfigError(
                    f"sizes[{n}].{what} of a profile names entry {wrong[0]}, and there are {count}"
                )

    def check_model(self, layers: Sequence[LayerFacts]) -> None:
        """Refuse another model than the profile is of.

        Raises:
            ConfigError: names the first layer that differs.
        """
        differs = first_difference(self.layers, layers, "profile")
        if differs is not None:
            raise ConfigError(
                f"the profile is of another model: {differs}. Make a profile of this model"
            )

    def save(self, path: str | Path) -> None:
        """Write the profile to a file, as JSON.

        Raises:
            UnreadableError: the file cannot be written.
        """
        file = path_of(path, "Profile")
        try:
            file.write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            raise UnreadableError(f"{path}: it cannot be written: {error.strerror}") from None

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Read a profile that `save` wrote.

        Raises:
            UnreadableError, ConfigError: the file does not hold one; names it and the place in it.
        """
        file = path_of(path, "Profile")
        try:
            return cls.from_json(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise UnreadableError(f"{path}: it cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UnreadableError(f"{path}: it is damaged, or no JSON: no UTF-8 text") from None
        except ConfigError as error:
            raise type(error)(f"{path}: {error}") from None

    def to_json(self) -> str:
        """Write the profile as JSON; `from_json` reads it back."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "Profile":
        """Read a profile that `to_json` wrote.

        Raises:
            UnreadableError: the text is cut off, or a value is missing, unknown or mistyped.
            ConfigError: values do not fit together.
        """
        profile: Profile = from_json(cls, text)
        return profile

    def __str__(self) -> str:
        from .profile_table import profile_lines

        return "\n".join(profile_lines(self))


def _below_zero(value: object, where: str) -> str:
    """Say which number in a value is below 0, or none at all; nothing where none is."""
    if isinstance(value, int | float):
        return "" if value >= 0 else f"{where} is {value!r}"
    if isinstance(value, tuple):
        parts = [(f"[{n}]", part) for n, part in enumerate(value)]
    elif is_dataclass(value):
        names = [f.name for f in fields(value) if f.name != "producer"]  # -1 is the model's input
        parts = [(f".{name}", getattr(value, name)) for name in names]
    else:
        return ""
    found = (_below_zero(part, where + place) for place, part in parts)
    return next(filter(None, found), "")
