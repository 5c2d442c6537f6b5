"""Processes: each runs one rank's program; values travel by torch.distributed.

main thread    the program: compute, begin sends, wait for receives that were posted early
background     receives, one after the other; sends, until they are delivered
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from penstock.errors import PenstockError
from penstock.mesh import Mesh
from penstock.mesh.background import Background, Slot
from penstock.model.pytree import from_template, template
from penstock.runtime.boundary import version_of
from penstock.runtime.channels import AbstractChannels
from penstock.runtime.executor import Executor
from penstock.runtime.run import Activation, Gradient
from penstock.schedules.ir import Instruction
from penstock.schedules.text import instruction_to_text
from penstock.schedules.walk import Message

from .base import AbstractTransport, Work
from .link import Incoming, Outgoing, Parcel


class _Peers(AbstractChannels):
    """The messages of one process; its links to others outlive a run."""

    def __init__(self, mesh: Mesh, background: Background) -> None:
        self._mesh, self._background = mesh, background
        self._incoming: dict[tuple[bool, int], Incoming] = {}
        self._outgoing: dict[tuple[bool, int], Outgoing] = {}
        self._posted: dict[Message, Slot] = {}
        self._sent: list[tuple[Slot, int]] = []

    def post(self, message: Message) -> None:
        is_gradient, source, _, microbatch = message
        key = (is_gradient, source)
        if key not in self._incoming:
            self._incoming[key] = Incoming(self._mesh, source, channel=int(is_gradient))
        incoming = self._incoming[key]
        with self._explaining(f"to begin to receive from stage {source}", source):
            job = partial(incoming.receive, incoming.post(microbatch))
        self._posted[message] = self._background.receives.submit(job)

    def send(self, message: Message, payload: Activation | Gradient) -> None:
        is_gradient, _, target, microbatch = message
        key = (is_gradient, target)
        if key not in self._outgoing:
            self._outgoing[key] = Outgoing(self._mesh, target, channel=int(is_gradient))
        with self._explaining(f"to begin to send to stage {target}", target):
            slot = self._outgoing[key].send(_pack(payload), microbatch)
        self._sent.append((slot, target))

    @contextmanager
    def _explaining(self, what: str, stage: int) -> Iterator[None]:
        """Say who is to blame when a connection to `stage` is found broken."""
        try:
            yield
        except PenstockError:
            raise
        except RuntimeError as error:
            rank = self._mesh.rank_of(stage)
            raise self._background.watch.explain(error, what, rank) from error

    def receive(self, message: Message, instruction: Instruction) -> Activation | Gradient:
        if message not in self._posted:
            self.post(message)
        is_gradient, source, _, microbatch = message
        what = "gradient" if is_gradient else "activation"
        parcel: Parcel = self._background.wait(
            self._posted.pop(message),
            f"at {instruction_to_text(instruction)} for the {what} of micro-batch {microbatch} "
            f"from stage {source}",
            self._mesh.rank_of(source),
        )
        return _unpack(parcel)

    def finish(self) -> None:
        """Wait until all that was sent is delivered."""
        sent, self._sent = self._sent, []
        for slot, target in sent:
            what = f"for stage {target} to take what was sent to it"
            self._background.wait(slot, what, self._mesh.rank_of(target))
        for incoming in self._incoming.values():
            incoming.end_run()
        for outgoing in self._outgoing.values():
            outgoing.end_run()


def _pack(payload: Activation | Gradient) -> Parcel:
    if isinstance(payload, Gradient):
        return Parcel(payload.leaves, None)
    about = (payload.wants_grad, template(payload.structure), payload.aliases)
    return Parcel(payload.leaves, about)


def _unpack(parcel: Parcel) -> Activation | Gradient:
    if parcel.about is None:
        return Gradient(parcel.tensors)
    wants_grad, form, aliases = parcel.about
    leaves = tuple(tensor for tensor in parcel.tensors if tensor is not None)
    versions = tuple(map(version_of, leaves))
    return Activation(leaves, wants_grad, from_template(form), versions, aliases)


class ProcessTransport(AbstractTransport):
    """Runs this process's program in the calling thread; the other programs run elsewhere."""

    def __init__(self, mesh: Mesh, num_threads: int) -> None:
        assert mesh.background is not None
        self._mesh, self._num_threads = mesh, num_threads
        self._channels = _Peers(mesh, mesh.background)

    def drive(self, work: Work) -> None:
        rank = self._mesh.stage
        program = work.schedule.programs[rank]
        executor = Executor(rank, program, work.stages, work.run, self._channels)
        num_threads = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            with work.caller.entered():
                executor.execute_all()
            self._channels.finish()
        finally:
            torch.set_num_threads(num_threads)
        executor.finish()

    def close(self) -> None:
        """The mesh owns what there is to give back."""
