"""Messages of ever changing kinds over one edge; called in two processes."""

import random
import threading

import pytest
import torch

import penstock
from penstock.model.pytree import flatten
from penstock.transport.payload import Activation, Gradient
from penstock.transport.torch_distributed import Incoming, Outgoing

NUM_RUNS, MICROBATCHES, NUM_KINDS = 150, 10, 400
LARGE = (300, 200)
"""The shape of what does not fit into the room that a receiver keeps ready."""


def payload(run: int, microbatch: int) -> Activation | Gradient:
    """Give a message: mostly what its micro-batch always is, at times another, or a large one."""
    draw = random.Random(run * MICROBATCHES + microbatch)
    kind = microbatch if draw.random() < 0.8 else draw.randrange(NUM_KINDS)
    generator = torch.Generator().manual_seed(run)
    shape = LARGE if draw.random() < 0.05 else (kind % 20 + 1, kind // 20 + 1)
    first = torch.randn(shape, generator=generator)
    second = torch.randn(kind % 7, 2, generator=generator).t()
    if kind % 3 == 0:
        return Gradient((first, None))
    leaves, structure = flatten({"kind": kind, "values": (first, second)})
    return Activation(tuple(leaves), (True, False), structure, (0, 0))


def link(mesh: penstock.Mesh) -> tuple[Outgoing, Incoming]:
    return Outgoing(mesh, 0, 1, 0, mesh.background.sends), Incoming(mesh, 0, 0)


def exchange(mesh: penstock.Mesh) -> None:
    """Send on stage 0, all of a run ahead; receive on stage 1."""
    outgoing, incoming = link(mesh)
    for run in range(NUM_RUNS):
        for i in range(MICROBATCHES):
            if mesh.stage == 0:
                outgoing.send(payload(run, i), i)
            else:
                check(incoming.receive(i, timeout_s=60.0), payload(run, i))
        if mesh.stage == 0:
            outgoing.finish(60.0)


def check(found: Activation | Gradient, expected: Activation | Gradient) -> None:
    assert type(found) is type(expected)
    if isinstance(found, Activation) and isinstance(expected, Activation):
        assert found.wants_grad == expected.wants_grad
        assert found.structure == expected.structure
    for a, b in zip(found.leaves, expected.leaves, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or (torch.equal(a, b) and a.stride() == b.stride())


def fail_while_waiting(mesh: penstock.Mesh) -> None:
    """Wait for a message that does not come, until the watch says that a process has failed."""
    _, incoming = link(mesh)
    if mesh.stage == 1:
        failed = penstock.errors.PeerError("rank 7 failed")
        threading.Timer(0.2, mesh.point_to_point.fail, [failed]).start()
        for _ in range(2):  # and whoever comes later
            with pytest.raises(penstock.errors.PeerError, match="rank 7"):
                incoming.receive(0, timeout_s=60.0)
    mesh.world.gather(None, "for the others to have seen it")


def wait_in_vain(mesh: penstock.Mesh) -> None:
    """Wait for a message until the deadline."""
    _, incoming = link(mesh)
    if mesh.stage == 1:
        with pytest.raises(TimeoutError):
            incoming.receive(0, timeout_s=0.2)
    mesh.world.gather(None, "for the others to have seen it")
