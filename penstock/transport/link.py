"""Both ends of one direction of an edge between two processes; each transport has its own kind."""

import time
from abc import ABC, abstractmethod

from torch import Tensor

from penstock.errors import MeshError, PeerError
from penstock.mesh.background import Slot
from penstock.mesh.plain_data import MOST_BYTES

from .headers import HeaderReader, HeaderWriter, Payload
from .payload import check_still_as_sent


class AbstractOutgoing(ABC):
    """The sending end, of `stage`, to the process `rank`."""

    def __init__(self, stage: int, rank: int) -> None:
        self._stage, self._rank = stage, rank
        self._headers = HeaderWriter()
        self._later: list[Slot] = []

    def forget_lasting(self) -> None:
        """Begin a run, or end one: parameters change between runs."""
        self._headers.forget_lasting()

    @abstractmethod
    def send(self, payload: Payload, microbatch: int) -> None:
        """Begin to send.

        Raises:
            ConnectionError: the connection broke.
            PeerError: a process has failed.
        """

    def finish(self, timeout_s: float) -> None:
        """Wait until all that was sent has left.

        Raises:
            Empty, TimeoutError: it has not within `timeout_s`.
            ConnectionError: the connection broke.
            PeerError: a process has failed.
        """
        slots, self._later = self._later, []
        for slot in slots:
            slot.get(timeout_s)

    def _check_as_sent(self, watched: list[tuple[Tensor, int]]) -> None:
        """Refuse tensors that were changed since they had their versions."""
        for tensor, version in watched:
            check_still_as_sent(tensor, version, self._stage)
        watched.clear()


class AbstractIncoming(ABC):
    """The receiving end, from the process `rank`; used by one thread at a time.

    `expects_much`: the next message had better be received while others are computed on.
    """

    expects_much = False

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._headers = HeaderReader()

    def forget_lasting(self) -> None:
        """Begin a run, or end one, as the sender does."""
        self._headers.forget_lasting()

    def post(self) -> None:  # noqa: B027 - most have nothing to do
        """Let the next message come in while others are computed on; `receive` is to follow."""

    def receive(self, microbatch: int, timeout_s: float | None = None) -> Payload:
        """Wait for the next message.

        Raises:
            TimeoutError: it is not there within `timeout_s`.
            PeerError: it is of another micro-batch: the processes run different schedules.
            ConnectionError: the connection broke.
            MeshError: it cannot be read.
        """
        return self._receive(
            microbatch, None if timeout_s is None else time.monotonic() + timeout_s
        )

    @abstractmethod
    def _receive(self, microbatch: int, deadline: float | None) -> Payload: ...

    def _check(self, sent: int, microbatch: int, header_bytes: int) -> None:
        if header_bytes > MOST_BYTES:
            raise MeshError(
                f"rank {self._rank} sent a header of {header_bytes:,} bytes: the connection is "
                "damaged, or the versions differ"
            )
        if sent != microbatch:
            raise PeerError(
                f"rank {self._rank} sent micro-batch {sent} where {microbatch} was due: the "
                "processes do not run the same schedule on the same batch"
            )
