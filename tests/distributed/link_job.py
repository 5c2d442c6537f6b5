"""Messages of ever changing kinds over one edge; called in two processes."""

import random

import torch

import penstock
from penstock.transport.link import Incoming, Outgoing, Parcel

NUM_RUNS, MICROBATCHES, NUM_KINDS = 150, 10, 400


def parcel(run: int, microbatch: int) -> Parcel:
    """Give a message: mostly what its micro-batch always is, at times another."""
    draw = random.Random(run * MICROBATCHES + microbatch)
    kind = microbatch if draw.random() < 0.8 else draw.randrange(NUM_KINDS)
    generator = torch.Generator().manual_seed(run)
    first = torch.randn(kind % 20 + 1, kind // 20 + 1, generator=generator)
    second = torch.randn(kind % 7, 2, generator=generator).t() if kind % 3 else None
    return Parcel((first, second), kind)


def exchange(mesh: penstock.Mesh) -> None:
    """Send on stage 0, all of a run ahead; receive on stage 1."""
    outgoing, incoming = Outgoing(mesh, 0, 1, channel=0), Incoming(mesh, 0, channel=0)
    for run in range(NUM_RUNS):
        if mesh.stage == 0:
            slots = [outgoing.send(parcel(run, i), i) for i in range(MICROBATCHES)]
            for slot in filter(None, slots):
                mesh.background.wait(slot, "for a test's messages to be taken")
            continue
        for i in range(MICROBATCHES):
            check(incoming.receive(i, timeout_s=60.0), parcel(run, i))


def check(found: Parcel, expected: Parcel) -> None:
    assert found.about == expected.about
    for a, b in zip(found.tensors, expected.tensors, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or (torch.equal(a, b) and a.stride() == b.stride())
