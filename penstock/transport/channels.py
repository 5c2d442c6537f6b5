"""What travels between stages, the values of a micro-batch or their gradients, and what an
executor sends them to and receives them from; each transport has its own kind.
"""

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
    """The messages of one run.  Both sides name a message by the same four values."""

    def post(self, message: Message) -> None:  # noqa: B027 - nothing to do is the usual answer
        """Get ready for `message`, which will be received soon."""

    @abstractmethod
    def send(self, message: Message, payload: Any) -> None:
        """Hand `payload` over; never waits."""

    @abstractmethod
    def receive(self, message: Message, instruction: Instruction) -> Any:
        """Return the payload of `message`, waiting for it until the deadline.

        Raises:
            WaitTimeout: it did not come in time.
            Stopped: another rank failed.
        """


class Stopped(BaseException):
    """Ends a rank whose peer has failed; never leaves a transport."""


class LoopbackChannels(AbstractChannels):
    """A message waits in a dict; the walk never asks for one before it was sent."""

    def __init__(self) -> None:
        self._payloads: dict[Message, Any] = {}

    def send(self, message: Message, payload: Any) -> None:
        self._payloads[message] = payload

    def receive(self, message: Message, instruction: Instruction) -> Any:
        return self._payloads.pop(message)


@dataclass(frozen=True, slots=True)
class Activation:
    """Values on their way to another stage: detached tensors, and which want a gradient.

    `aliases` are the places of tensors that share memory with another value, so that a change in
    place would have to be seen in both.  `versions` are those the tensors had when they left: a
    later one means that the sender has changed them in place since.  `lasting` are the places of
    parameters: the same for all micro-batches of a run.  `hooked` are the places of tensors with
    hooks on their gradient, which their stage runs.  `layouts` are those of slices, where the
    processes that share a stage hold slices of a value; None: each has all of it.
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
    """Gradients on their way back, one for each leaf of the activation, or None."""

    leaves: tuple[Tensor | None, ...]
    event: torch.cuda.Event | None = None
    layouts: "Layouts" = ()


Layouts = tuple[Layout | None, ...]
"""For each leaf of a message; () if all are whole."""


def check_still_as_sent(tensor: Tensor, version: int, stage: int) -> None:
    """Refuse a value that its sender has changed in place since it left.

    Raises:
        BoundaryError: it has.
    """
    if version_of(tensor) != version:
        raise BoundaryError(
            f"a tensor of shape {tuple(tensor.shape)} that left stage {stage} was changed in "
            "place there afterwards (a buffer that a layer returns and moves in place, say, or "
            "the weight of an nn.Embedding(max_norm=...) that is called on several stages); later "
            "stages would see a later micro-batch's values. Return a copy (x.clone()), leave out "
            "max_norm, or keep the uses of the weight on one stage"
        )
