"""What one stage of a model runs, layer by layer, and which values it hands over."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from penstock.errors import ConfigError
from penstock.schedules.transfers import Transfer

Value = tuple[int, int]
"""(number of the layer that gives it, place among its outputs); the model's input is (-1, 0)."""

MODEL_INPUT: Value = (-1, 0)


@dataclass(frozen=True, slots=True)
class Step:
    """One layer with its values resolved: `module(*inputs)` gives `outputs`."""

    index: int
    name: str
    module: nn.Module
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    @property
    def label(self) -> str:
        """The layer as an error message names it."""
        return f"{self.name!r} ({type(self.module).__name__})"


Perform = Callable[[Step, Callable[[], Any]], Any]
"""(step, function) -> the function's result: how a stage runs one layer's call."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What one stage runs, and what it hands over.

    `imports[peer]` and `exports[peer]` are the values that come from and go to stage `peer`, in an
    order both sides agree on.  `dead_after[n]` are the values nobody needs once layer n of the
    stage has run.
    """

    index: int
    steps: tuple[Step, ...]
    reads_input: bool
    imports: dict[int, tuple[Value, ...]]
    exports: dict[int, tuple[Value, ...]]
    output: tuple[Value, ...]
    dead_after: tuple[tuple[Value, ...], ...]

    @property
    def any_shape(self) -> bool:
        """Whether values without a batch dimension may cross."""
        return False

    @property
    def shares_input(self) -> bool:
        """Whether other stages read the caller's batch as well."""
        return False

    @property
    def decides(self) -> bool:
        """Whether values decide what runs, so that micro-batches may use different parameters."""
        return False

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """What the stage hands over to which others."""
        return tuple(
            Transfer(producer=self.index, consumer=peer, values=self.names_to(peer))
            for peer in self.exports
        )

    def names_to(self, peer: int) -> tuple[str, ...]:
        """Name the values that go to stage `peer`, by the numbers of the layers that give them."""
        return tuple(map(_name_of, self.exports[peer]))

    @property
    def num_parameters(self) -> int:
        """Values of the parameters whose home is here, in whichever process the stage runs."""
        own = {id(p): p.numel() for step in self.steps for p in step.module.parameters()}
        return sum(own.values())

    def run(self, values: dict[Value, Any], perform: Perform) -> None:
        """Run the stage's part of the model: from its imports in `values` to its exports there."""
        for step, dead in zip(self.steps, self.dead_after, strict=True):
            arguments = [values[v] for v in step.inputs]
            values.update(perform(step, partial(call, step, arguments)))
            for value in dead:
                del values[value]


def _name_of(value: Value) -> str:
    layer, place = value
    name = "input" if value == MODEL_INPUT else f"layer {layer}"
    return f"{name}, output {place}" if place else name


def call(step: Step, arguments: list[Any]) -> dict[Value, Any]:
    """Run one layer; name what it gives.

    Raises:
        ConfigError: it names several outputs and returns something else than a tuple of as many.
    """
    result = step.module(*arguments)
    if len(step.outputs) == 1:
        return {step.outputs[0]: result}
    if not isinstance(result, tuple | list) or len(result) != len(step.outputs):
        got = (
            f"{len(result)} values" if isinstance(result, tuple | list) else type(result).__name__
        )
        raise ConfigError(
            f"layer {step.label} names {len(step.outputs)} outputs but returned {got}; "
            f"return a tuple of {len(step.outputs)}, or name one output"
        )
    return dict(zip(step.outputs, result, strict=True))


def join_output(values: list[Any]) -> Any:
    """Give the model's output as the last layer gave it: one value, or a tuple of several."""
    return values[0] if len(values) == 1 else tuple(values)
