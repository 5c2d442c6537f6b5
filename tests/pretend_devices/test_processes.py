"""Processes with a pretended GPU each have the bits of processes on the CPU, and no race."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import run

_SLOW = pytest.mark.slow
POOLS = "batch_norm_over_replicas=True"
"""Statistics are pooled on the host, which no graph can do."""


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        pytest.param((2, 1, 1), ["schedule=1f1b"], id="1f1b", marks=_SLOW),
        pytest.param((2, 1, 1), ["schedule=1f1b", "graphs=True"], id="graphs"),
        pytest.param(
            (2, 2, 1), ["schedule=1f1b", "graphs=True"], id="graphs of replicas", marks=_SLOW
        ),
        pytest.param(
            (3, 1, 1),
            ["schedule=interleaved_1f1b", "recompute=stage", "tied=True", "graphs=True"],
            id="interleaved graphs",
            marks=_SLOW,
        ),
        pytest.param((3, 1, 1), ["schedule=zb_v", "graphs=True"], id="zb_v graphs", marks=_SLOW),
        pytest.param(
            (1, 2, 1),
            ["schedule=gpipe", "graphs=True", "norms=True", POOLS],
            id="pooled",
            marks=_SLOW,
        ),
        pytest.param((3, 1, 1), ["schedule=interleaved_1f1b"], id="interleaved", marks=_SLOW),
        pytest.param((3, 1, 1), ["schedule=zb_v"], id="zb_v", marks=_SLOW),
        pytest.param((2, 2, 1), ["schedule=gpipe"], id="replicas", marks=_SLOW),
        pytest.param((1, 1, 2), ["sharding=zero3"], id="zero3", marks=_SLOW),
        pytest.param((1, 1, 2), ["sharding=data"], id="data", marks=_SLOW),
        pytest.param((2, 1, 2), ["sharding=megatron"], id="shards", marks=_SLOW),
    ],
)
def test_processes_have_the_bits_of_the_cpu_and_no_race(
    sizes: tuple[int, int, int], options: list[str], tmp_path: Path
) -> None:
    for device in ("cpu", "cuda:0"):
        _run(tmp_path / device, device, sizes, options)
    for rank in range(prod(sizes)):
        (wanted, *_), (found, races, num_replays) = (
            torch.load(tmp_path / device / f"{rank}.pt") for device in ("cpu", "cuda:0")
        )
        is_captured = "graphs=True" in options and POOLS not in options
        assert num_replays == 4 * is_captured
        assert found.keys() == wanted.keys()
        assert [name for name in found if not _are_equal(found[name], wanted[name])] == []
        assert races == []


@pytest.mark.slow
def test_all_processes_run_eagerly_if_one_cannot_capture(tmp_path: Path) -> None:
    for device in ("cpu", "cuda:0"):
        options = ["schedule=1f1b", "graphs=True"]
        _run(tmp_path / device, device, (2, 1, 1), options, {"ASKS": "1"})
    for rank in range(2):
        (wanted, *_), (found, races, num_replays) = (
            torch.load(tmp_path / device / f"{rank}.pt") for device in ("cpu", "cuda:0")
        )
        assert [name for name in wanted if not _are_equal(found[name], wanted[name])] == []
        assert (races, num_replays) == ([], 0)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        pytest.param((2, 1, 1), ["schedule=gpipe"], id="messages"),
        pytest.param((2, 1, 1), ["schedule=1f1b", "graphs=True"], id="replays", marks=_SLOW),
        pytest.param((1, 1, 2), ["sharding=megatron"], id="collectives", marks=_SLOW),
    ],
)
def test_a_process_whose_peer_is_killed_says_so_and_waits_no_longer(
    sizes: tuple[int, int, int], options: list[str], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="rank 1: 9"):
        _run(tmp_path, "cuda:0", sizes, options, {"FATAL": "1"})
    found, *_ = torch.load(tmp_path / "0.pt")
    assert "rank 1" in found["error"]


def _run(
    folder: Path,
    device: str,
    sizes: tuple[int, int, int],
    options: list[str],
    environment: Mapping[str, str] | None = None,
) -> None:
    folder.mkdir(exist_ok=True)
    job = ["-m", "tests.pretend_devices.processes_job", str(folder), device]
    run(prod(sizes), [*job, *map(str, sizes), *options], environment=environment)


def _are_equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)
