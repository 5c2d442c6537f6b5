"""Weights that several stages use: one of them has the parameter, the others are sent it.

The first stage that uses a parameter is its home.  For the others it is a value like any other,
whose gradient comes back for each micro-batch; so the terms add up in the order in which an
unsplit backward pass adds them, and there is one parameter to an optimizer and in checkpoints.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .ghost import map_tensors
from .record import Event
from .routes import Call
from .values import EventKey, ValueId


@dataclass(frozen=True, slots=True)
class Tied:
    """A parameter that is used on `stages`; the first one is its home.

    `names` are all that it has in the model.  Where the model is spread over processes, the
    modules of one that is not the home hold parameters of their own, without values.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]

    @property
    def value(self) -> ValueId:
        """What it is called on its way."""
        return ValueId(EventKey(f"={self.names[0]}", 0, 0), 0)


def find_tied(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    stage_of: Mapping[Call, int],
    stages: Iterable[tuple[Event, int]],
) -> tuple[Tied, ...]:
    """Find the parameters that blocks, or code between them, use on several stages.

    `stages` are the recorded events with the stages they run on.
    """
    users: dict[int, set[int]] = {}
    for (block, _), stage in stage_of.items():
        for parameter in blocks[block].parameters():
            users.setdefault(id(parameter), set()).add(stage)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for event, stage in stages:
        for name in event.parameters:
            users.setdefault(id(model.get_parameter(name)), set()).add(stage)
    return tuple(
        Tied(tuple(found), tuple(sorted(users[number])))
        for number, found in names.items()
        if len(users.get(number, ())) > 1
    )


class Lent(TorchFunctionMode):
    """Lets operations read what was sent for a parameter instead of the parameter."""

    def __init__(self, sent: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._sent = sent

    def replaced(self, value: Any) -> Any:
        """Put what was sent for parameters into nested values."""
        return map_tensors(lambda tensor: self._sent.get(id(tensor), tensor), value)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*self.replaced(args), **self.replaced(kwargs or {}))
