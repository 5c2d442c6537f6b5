"""Messages between stages, activations and gradients, and the channels that carry them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import BoundaryError
from penstock.model.entries import version_of
from penstock.model.pytree import Structure
from penstock.schedules.ir import Instruction, Message
from penstock.sharding.layouts import Layout


class AbstractChannels(ABC):
    """The channels of one run.  Both sides name a message by the same four values."""

    def post(self, message: Message) -> None:  # noqa: B027 - nothing to do is the usual answer
        """Prepare for `message`, which will be received soon."""

    @abstractmethod
    def send(self, message: Message, payload: Any) -> None:
        """Hand `payload` over; never waits."""

    @abstractmethod
    def receive(self, message: Message, instruction: Instruction) -> Any:
        """Wait for a message's payload; WaitTimeout if late, Stopped if another rank failed."""


class Stopped(BaseException):
    """Ends a rank whose peer has failed; never leaves a transport."""


class LoopbackChannels(AbstractChannels):
    """Channels within one thread: a dict of messages, each sent before it is received."""

    def __init__(self) -> None:
        self._payloads: dict[Message, Any] = {}

    def send(self, message: Message, payload: Any) -> None:
        self._payloads[message] = payload

    def receive(self, message: Message, instruction: Instruction) -> Any:
        return self._payloads.pop(message)


@dataclass(frozen=True, slots=True)
class Activation:
    """Values for another stage: detached tensors, and a flag for those that want a gradient.

    Sets are of places in `leaves`.  `aliases` share memory with another value, so that a change in
    place would have to appear in both.  `versions` are the tensors' version counters at the send;
    a later one shows that the sender has changed the tensor in place.  `lasting` are parameters,
    the same for all micro-batches of a run.  `hooked` have hooks on their gradient, which their
    stage runs.  `layouts` are the layouts of tensors in slices, None for a whole one.
    """

    leaves: tuple[Tensor, ...]
    wants_grad: tuple[bool, ...]
    structure: Structure
    versions: tuple[int, ...]
    aliases: frozenset[int] = frozenset()
    event: torch.cuda.Event | None = None
    lasting: frozenset[int] = frozenset()
    hooked: frozenset[int] = frozenset()
    layouts: "Layouts" = ()


@dataclass(frozen=True, slots=True)
class Gradient:
    """Gradients for the leaves of an activation, or None, on their way back."""

    leaves: tuple[Tensor | None, ...]
    event: torch.cuda.Event | None = None
    layouts: "Layouts" = ()


Layouts = tuple[Layout | None, ...]
"""A layout for each leaf of a message; () if all are whole."""


def check_still_as_sent(tensor: Tensor, version: int, stage: int) -> None:
    """Raise BoundaryError for a tensor that its sender has changed in place since the send."""
    if version_of(tensor) != version:
        raise BoundaryError(
            f"a tensor of shape {tuple(tensor.shape)} that left stage {stage} was changed in "
            "place there afterwards (a buffer that a layer returns and moves in place, say, or "
            "the weight of an nn.Embedding(max_norm=...) that is called on several stages); later "
            "stages would see a later micro-batch's values. Return a copy (x.clone()), leave out "
            "max_norm, or keep the uses of the weight on one stage"
        )
