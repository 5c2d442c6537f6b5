"""An edge keeps its messages apart, whatever their kinds and however far ahead they are sent."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.mesh.point_to_point import PointToPoint
from penstock.model.pytree import flatten
from penstock.transport.channels import Activation, Gradient
from penstock.transport.torch_distributed import Incoming, Outgoing
from tests.distributed.call import call

NUM_RUNS, MICROBATCHES, NUM_KINDS = 150, 10, 400
LARGE, HUGE = (300, 200), (1100, 1000)
"""Shapes of what does not fit at first into the room that a receiver keeps ready; and never."""


def payload(run: int, microbatch: int) -> Activation | Gradient:
    """Give a message: mostly what its micro-batch always is, at times another, or a large one."""
    draw = random.Random(run * MICROBATCHES + microbatch)
    kind = microbatch if draw.random() < 0.8 else draw.randrange(NUM_KINDS)
    generator, size = torch.Generator().manual_seed(run), draw.random()
    shape = LARGE if size < 0.05 else (kind % 20 + 1, kind // 20 + 1)
    shape = HUGE if size < 0.002 else shape
    first = torch.randn(shape, generator=generator)
    second = torch.randn(kind % 7, 2, generator=generator).t()
    if kind % 3 == 0:
        return Gradient((first, None))
    leaves, structure = flatten({"kind": kind, "values": (first, second)})
    return Activation(tuple(leaves), (True, False), structure, (0, 0))


def end_of(mesh: penstock.Mesh) -> Any:
    """Return this process's end of a link from stage 0 to stage 1."""
    return Outgoing(mesh, 0, 1, 0) if mesh.stage == 0 else Incoming(mesh, 0, 0)


def exchange(mesh: penstock.Mesh) -> None:
    end = end_of(mesh)
    for run in range(NUM_RUNS):
        for i in range(MICROBATCHES):
            if mesh.stage == 0:
                end.send(payload(run, i), i)
            else:
                check(end.receive(i, timeout_s=60.0), payload(run, i))
        if mesh.stage == 0:
            end.finish(60.0)


def check(found: Activation | Gradient, expected: Activation | Gradient) -> None:
    assert type(found) is type(expected)
    if isinstance(found, Activation) and isinstance(expected, Activation):
        assert found.wants_grad == expected.wants_grad and found.structure == expected.structure
    for a, b in zip(found.leaves, expected.leaves, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or (torch.equal(a, b) and a.stride() == b.stride())


def wait_in_vain(mesh: penstock.Mesh) -> None:
    """Wait for a message until the deadline, which closes the connection; on another mesh, until
    the watch says that a process has failed.
    """
    end = end_of(mesh)
    if mesh.stage == 1:
        with pytest.raises(TimeoutError):
            end.receive(0, timeout_s=0.2)
    mesh.world.gather(None, "for the others to have seen it")
    mesh = penstock.init_mesh(mesh.num_stages, timeout_s=60.0)
    end = end_of(mesh)
    if mesh.stage == 1:
        failed = penstock.errors.PeerError("rank 7 failed")
        threading.Timer(0.2, mesh.point_to_point.fail, [failed]).start()
        for _ in range(2):  # and whoever comes later
            with pytest.raises(penstock.errors.PeerError, match="rank 7"):
                end.receive(0, timeout_s=60.0)
    mesh.world.gather(None, "for the others to have seen it")


def connect_many_times(mesh: penstock.Mesh) -> None:
    """Make torch's connections again and again: who begins one depends on ports."""
    for _ in range(12):
        PointToPoint([range(2)], mesh.rank, mesh.background, mesh.device)


@pytest.mark.parametrize("job", [pytest.param(exchange, marks=pytest.mark.slow), wait_in_vain])
def test_an_edge_between_processes(job: Callable[[penstock.Mesh], None], tmp_path: Path) -> None:
    call(job, (2, 1), tmp_path)


def test_processes_that_connect_at_the_first_use_do_not_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    call(connect_many_times, (2, 1), tmp_path)
