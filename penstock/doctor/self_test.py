"""A check of a tiny pipeline, here or over the mesh: to the bit."""

from typing import Any

import torch
from torch import nn

from penstock.equality import CheckReport, check
from penstock.mesh import Mesh

from .settings import Finding

_WIDTH, _BATCH, _NUM_MICROBATCHES = 16, 14, 4
_CLOSE = 1e-4
"""Tensors that differ by less, relatively, differ by rounding."""


def self_test(where: str, num_stages: int, **options: Mesh | str) -> tuple[str, list[Finding]]:
    """Check a step of two layers a stage, with BatchNorm and dropout; gives the same on all ranks.

    `options` are a `mesh`, or `devices`, of `Pipeline`.

    Raises:
        PeerError: another process failed, or is gone.
    """
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        for _ in range(num_stages):
            layers.append(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.BatchNorm1d(_WIDTH)))
            layers.append(nn.Sequential(nn.Tanh(), nn.Dropout(0.1)))
        inputs, targets = torch.randn(2, _BATCH, _WIDTH)
    how: dict[str, Any] = {"loss": nn.functional.mse_loss, "num_microbatches": _NUM_MICROBATCHES}
    how |= {"partition": [2] * num_stages, "threads_per_stage": 1, **options}
    try:
        report: CheckReport | Exception = check(layers, inputs, targets, **how)
    except Exception as failure:  # a torch that does not fit the machine fails in ways of its own
        if "mesh" in options:
            raise  # the other processes have to hear of it
        report = failure
    return judge(where, report, is_job="mesh" in options)


def judge(
    where: str, report: CheckReport | Exception, *, is_job: bool
) -> tuple[str, list[Finding]]:
    """Say what was found, and what is wrong of it: in a job, rounding is no error."""
    if isinstance(report, Exception):
        reason = str(report).strip().partition("\n")[0]
        text = f"{where}: FAILED: {type(report).__name__}: {reason}"
    else:
        text = f"{where}: {report.verdict}"
        if report.equal:
            return text, []
        if is_job and report.most <= _CLOSE:
            why = "processors of several kinds round differently; use equal ones where bits count"
            return text, [Finding(False, f"the self-test: {text}: {why}")]
    remedy = "See that this build of torch fits the machine, and report this with the output of"
    return text, [Finding(True, f"the self-test: {text}. {remedy} penstock doctor")]
