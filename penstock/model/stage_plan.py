"""The plan of a stage: the layers it runs, and the values that cross each edge between stages.

A value that several stages use travels as a relay: from its producer to the first stage that uses
it, from there to the next one that does, and so on; it never visits a stage that has no use for
it. Its gradient runs the relay backwards.  Each holder so starts its own sum with what came from
behind, which is the order in which an unsplit backward pass adds the same terms.

    value given on stage 0, used on 1 and 3:   0 ──► 1 ──► 3      activation
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
"""(number of the layer that gives it, place among its outputs); the model's input is (-1, 0)."""

MODEL_INPUT: Value = (-1, 0)


@dataclass(frozen=True, slots=True)
class Step:
    """One layer with its values resolved: `module(*inputs)` gives `outputs`.

    `path` is what the names of its parameters begin with.
    """

    index: int
    name: str
    path: str
    module: nn.Module
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    @property
    def label(self) -> str:
        """The layer as an error message names it."""
        return f"{self.name!r} ({type(self.module).__name__})"

    def run(self, *arguments: Any) -> dict[Value, Any]:
        """Run one layer; name what it returns.

        Raises:
            ConfigError: it names several outputs and does not return a tuple of as many.
        """
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
"""(step, function) -> the function's result: how a stage runs one layer's call.

The function is a `functools.partial`, so that its arguments can be seen.
"""


class Crossing(NamedTuple):
    """Tensors that one layer gives to others, or to the loss, where each layer is a stage.

    `producer` is the layer's number, -1 for the model's input; `consumers` are in order.
    """

    producer: int
    consumers: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    is_weight: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """What one stage runs, and what it hands over.

    Args:
        index: which stage it is.
        steps: its layers.
        reads_input: whether it is given the model's input.
        imports: by stage, the values that come from there, in an order both sides agree on.
        exports: by stage, the values that go there, likewise.
        transfers: the same with the values' names, for schedules.
        output: the values that are the model's output; none where the stage is not the last.
        parameters: the names of the parameters that it has.
        num_parameters: how many values these hold, in whichever process the stage runs.
        run: runs its part of the model: from its imports in a dict of values to its exports there.
        any_shape: whether values without a batch dimension may cross.
        shares_input: whether other stages read the caller's batch as well.
        decides: whether values decide what runs, so that micro-batches may use different
            parameters.
        draws_between: whether the code between layers draws from Python's or NumPy's global
            generator, on each stage the same.
        differentiates: whether the code between layers computes gradients in the forward.
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
    """Run layers one after the other; `dead_after[n]` is what nobody needs after layer n."""
    for step, dead in zip(steps, dead_after, strict=True):
        values.update(perform(step, partial(step.run, *map(values.__getitem__, step.inputs))))
        for value in dead:
            del values[value]


def join_output(values: list[Any]) -> Any:
    """Return the model's output as the last layer gave it: one value, or a tuple of several."""
    return values[0] if len(values) == 1 else tuple(values)


def stage_of_layers(partition: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stage of each layer for a partition into `partition[s]` layers per stage."""
    return tuple(stage for stage, count in enumerate(partition) for _ in range(count))


def relays(held: Mapping[T, Sequence[int]], num_stages: int) -> list[dict[int, tuple[T, ...]]]:
    """Return, per stage, what it sends to whom: to the next one that holds the value.

    `held` has the stages of each value, from its producer to its last user.
    """
    sent: list[dict[int, list[T]]] = [{} for _ in range(num_stages)]
    for value, stages in held.items():
        for source, target in pairwise(stages):
            sent[source].setdefault(target, []).append(value)
    return [{peer: tuple(values) for peer, values in of.items()} for of in sent]
