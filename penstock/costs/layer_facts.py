"""The identity of layers, by which plans and profiles refuse another model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import inf

from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Facts that tell a layer from the layers of other models."""

    name: str
    kind: str
    """Name of the module's class."""
    num_parameters: int
    """Number of parameters; the first of several layers counts a shared one."""
    shapes: str
    """Digest of the names and shapes of parameters."""

    def __post_init__(self) -> None:
        if not self.num_parameters >= 0:
            raise ConfigError(
                f"num_parameters of layer {self.name!r} is {self.num_parameters}; it must be at "
                "least 0"
            )

    @classmethod
    def of(
        cls, name: str, kind: str, num_parameters: int, shapes: Mapping[str, Sequence[int]]
    ) -> "LayerFacts":
        """Describe a layer; `shapes` are those of its parameters, by name."""
        text = repr(sorted((path, tuple(shape)) for path, shape in shapes.items()))
        return cls(name, kind, num_parameters, sha256(text.encode()).hexdigest()[:12])

    def __str__(self) -> str:
        return f"{self.name!r} ({self.kind})"


def first_difference(
    known: Sequence[LayerFacts], model: Sequence[LayerFacts], holder: str
) -> str | None:
    """Return a text about the first layer that differs between a `holder`, such as "plan", and the
    model; None if all layers are the same.
    """
    for n, (layer, other) in enumerate(zip(known, model, strict=False)):
        if layer == other:
            continue
        if (layer.name, layer.kind) != (other.name, other.kind):
            return f"layer {n} is {layer} in the {holder} and {other} in the model"
        return f"the parameters of layer {n}, {other}, have other names or shapes"
    if len(known) == len(model):
        return None
    longer, where = (known, holder) if len(known) > len(model) else (model, "model")
    n = min(len(known), len(model))
    return (
        f"it has {len(known)} layers and the model {len(model)}; layer {n}, {longer[n]}, is in "
        f"the {where} only"
    )


def check_factors(factors: Sequence[float], num_layers: int) -> None:
    """Refuse factors that are not () or a finite number above 0 for each layer."""
    if len(factors) not in (0, num_layers) or not all(0 < factor < inf for factor in factors):
        raise ConfigError(
            f"layer_factors={factors!r:.80} of a plan with {num_layers} layers; give a "
            "finite number above 0 for each layer, or ()"
        )
