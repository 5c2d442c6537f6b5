"""The plan of a stage: the layers it runs, and the values that cross each edge between stages.

A value that several stages use is relayed: its producer sends it to the first stage that uses it,
that stage to the next user, and so on.  Other stages never get it.  Its gradient takes the same
relay backwards.  So each stage adds its own terms to the sum of the later stages, which is the
order of an unsplit backward.

    value made on stage 0, used on 1 and 3:    0 ──► 1 ──► 3      activation
                                               0 ◄── 1 ◄── 3      gradient
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.schedules.transfers import Transfer

from .owned import NOTHING, Between

T = TypeVar("T")

Value = tuple[int, int]
"""(number of the layer that makes it, place among its outputs); the model's input is (-1, 0)."""

MODEL_INPUT: Value = (-1, 0)


@dataclass(frozen=True, slots=True)
class Step:
    """One layer with its values resolved: `module(*inputs)` returns `outputs`.

    `path` is the prefix of the names of its parameters.
    """

    index: int
    name: str
    path: str
    module: nn.Module
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    @property
    def label(self) -> str:
        """The layer's name in error messages."""
        return f"{self.name!r} ({type(self.module).__name__})"

    def run(self, *arguments: Any) -> dict[Value, Any]:
        """Run the layer; return its outputs by name, or raise ConfigError for another number."""
        result = self.module(*arguments)
        if len(self.outputs) == 1:
            return {self.outputs[0]: result}
        if not isinstance(result, tuple | list) or len(result) != len(self.outputs):
            is_several = isinstance(result, tuple | list)
            got = f"{len(result)} values" if is_several else type(result).__name__
            raise ConfigError(
                f"layer {self.label} names {len(self.outputs)} outputs but returned {got}; "
                f"return a tuple of {len(self.outputs)}, or name one output"
            )
        return dict(zip(self.outputs, result, strict=True))


Perform = Callable[[Step, Callable[[], Any]], Any]
"""(step, function) -> the function's result: runs the call of one layer.

The function is a `functools.partial`, so that its arguments can be inspected.
"""


class Crossing(NamedTuple):
    """Tensors from one layer to others, or to the loss, if each layer is a stage.

    `producer` is the layer's number, -1 for the model's input; `consumers` are in order.
    """

    producer: int
    consumers: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    is_weight: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The layers of a stage, and its transfers.

    Args:
        index: the number of the stage.
        steps: its layers.
        reads_input: it gets the model's input.
        imports: the values from each other stage, in the order of that stage's exports.
        exports: the values for each other stage.
        transfers: the exports with the values' names, for schedules.
        output: the values of the model's output; none unless the stage is the last one.
        parameters: the names of its parameters.
        num_parameters: the number of their elements, also if another process has them.
        run: runs its part of the model, from imports to exports in a dict of values.
        any_shape: values without a batch dimension may cross.
        shares_input: other stages read the caller's batch as well.
        decides: values decide which code runs, so that micro-batches may use different
            parameters.
        draws_between: the code between layers draws from Python's or NumPy's global generator,
            the same on each stage.
        differentiates: the code between layers computes gradients in the forward.
        between: the parameters and buffers that the code between layers reads.
    """

    index: int
    steps: tuple[Step, ...]
    reads_input: bool
    imports: dict[int, tuple[Value, ...]]
    exports: dict[int, tuple[Value, ...]]
    transfers: tuple[Transfer, ...]
    output: tuple[Value, ...]
    parameters: tuple[str, ...]
    num_parameters: int
    run: Callable[[dict[Value, Any], Perform], None]
    any_shape: bool = False
    shares_input: bool = False
    decides: bool = False
    draws_between: bool = False
    differentiates: bool = False
    between: Between = NOTHING


def run_steps(
    steps: Sequence[Step],
    dead_after: Sequence[Sequence[Value]],
    values: dict[Value, Any],
    perform: Perform,
) -> None:
    """Run layers one after the other; `dead_after[n]` are the values to free after layer n."""
    for step, dead in zip(steps, dead_after, strict=True):
        values.update(perform(step, partial(step.run, *map(values.__getitem__, step.inputs))))
        for value in dead:
            del values[value]


def join_output(values: list[Any]) -> Any:
    """Return the model's output as the last layer did: one value, or a tuple of several."""
    return values[0] if len(values) == 1 else tuple(values)


def stage_of_layers(partition: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stage of each layer for a partition into `partition[s]` layers per stage."""
    return tuple(stage for stage, count in enumerate(partition) for _ in range(count))


def relays(held: Mapping[T, Sequence[int]], num_stages: int) -> list[dict[int, tuple[T, ...]]]:
    """Return the values that each stage sends to each other: to the next holder of the value.

    `held` has the stages of each value, from its producer to its last user.
    """
    sent: list[dict[int, list[T]]] = [{} for _ in range(num_stages)]
    for value, stages in held.items():
        for source, target in pairwise(stages):
            sent[source].setdefault(target, []).append(value)
    return [{peer: tuple(values) for peer, values in of.items()} for of in sent]
