"""Two processes, on a card each or on one that they share: stages, and replicas with buckets."""

import pickle
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_campaign.contestants import Work, piped
from benchmarks.gpu_campaign.job import WORK
from benchmarks.gpu_campaign.measure import Row, rows_of
from penstock.schedules import one_f_one_b
from tests.distributed.launch import run

LIMIT_S = 60.0
"""The most seconds that processes may take on a card; then they are killed."""
LEAST_S = 30.0
"""The least that they are given: to start takes a while."""
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
"""Variables that let two NCCL ranks share a GPU, and its multiprocessors."""
FIRST_SHARED = (2, 30)
"""The first NCCL with these."""


def stages(work: Work, until: float) -> Iterator[Row]:
    """Yield rows of two stages: Penstock's, compared with one process, and torch's own."""
    cases = {
        "Penstock, 2 processes, 1F1B": partial(_penstock, work, until, "stages"),
        "Penstock, 2 processes, 1F1B, a graph each": partial(_penstock, work, until, "graphs"),
        "torch.distributed.pipelining, 2 processes, 1F1B": partial(_torch, work, until),
    }
    return rows_of(cases, until)


def buckets(work: Work, until: float) -> Iterator[Row]:
    """Yield a row of two replicas that sum gradients during and after the last backward."""
    return rows_of({"2 replicas": partial(_replicas, work, until)}, until)


def _penstock(work: Work, until: float, job: str) -> Row:
    if why := _why_not(work.device):
        return {"remark": why}
    row, parts = _run(job, work, until)
    found: dict[str, Any] = {name: bits for part in parts for name, bits in part.items()}
    words = work.words()
    with piped(work, 2, schedule=one_f_one_b) as pipe:
        loss = pipe.train_step(words, words)
        wanted = {name: p.grad for name, p in pipe.named_parameters()} | {"loss": loss}
    same = [
        name in found and grad is not None and torch.equal(found[name], grad.cpu())
        for name, grad in wanted.items()
    ]
    return row | {"equal_bits": all(same) and len(found) == len(wanted)}


def _torch(work: Work, until: float) -> Row:
    why = _why_not(work.device)
    return {"remark": why} if why else _run("torch", work, until)[0]


def _replicas(work: Work, until: float) -> Row:
    why = _why_not(work.device)
    return {"remark": why} if why else _run("replicas", work, until)[0]


def _why_not(device: torch.device) -> str:
    """Say why two processes cannot run; "" if they can."""
    if device.type != "cuda" or torch.cuda.device_count() > 1:
        return ""
    if (version := torch.cuda.nccl.version()) >= FIRST_SHARED:
        return ""
    return f"not run: NCCL {version} refuses two ranks on a GPU; 2.30 and later allow them"


def _run(job: str, work: Work, until: float) -> tuple[Row, list[dict[str, Any]]]:
    """Run a job in two processes.

    Returns:
        The larger figure of both for each key, and the tensors that each left.

    Raises:
        AssertionError: a process failed, or was killed at the limit; it has what they wrote.
    """
    is_shared = work.device.type == "cuda" and torch.cuda.device_count() == 1
    environment: Mapping[str, str] = SHARED if is_shared else {}
    limit_s = max(LEAST_S, until - time.monotonic())
    if work.device.type == "cuda":
        limit_s = min(LIMIT_S, limit_s)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / WORK).write_bytes(pickle.dumps(work))
        run(2, ["-m", "benchmarks.gpu_campaign.job", job, folder], limit_s, environment)
        left = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]
    figures = [row for row, _ in left]
    return {key: max(row[key] for row in figures) for key in figures[0]}, [b for _, b in left]
