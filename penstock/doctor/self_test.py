"""A tiny pipeline against the unsplit model, here and over the mesh: to the bit."""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.equality import check
from penstock.equality.unsplit import run_unsplit
from penstock.mesh import Mesh
from penstock.model.layer_list import as_layers
from penstock.pipeline import Pipeline
from penstock.trace.units import count_text
from penstock.types import Reduction

from .settings import Finding

_WIDTH, _BATCH, _NUM_MICROBATCHES = 16, 14, 4
_CLOSE = 1e-4
"""Losses that differ by less, relatively, differ by rounding."""


class Outcome(NamedTuple):
    """One rank's loss over the mesh, the unsplit model's there, and how many of the gradients of
    its stage differ between the two.
    """

    loss: float
    unsplit_loss: float
    differing: int

    @property
    def equal(self) -> bool:
        """Whether no bit differs."""
        return self.loss == self.unsplit_loss and not self.differing


def layers_for(num_stages: int) -> list[nn.Module]:
    """Make two layers a stage, with BatchNorm and dropout; equal at every call."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return [
            layer
            for _ in range(num_stages)
            for layer in (
                nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.BatchNorm1d(_WIDTH)),
                nn.Sequential(nn.Tanh(), nn.Dropout(0.1)),
            )
        ]


def batch() -> tuple[Tensor, Tensor]:
    """Draw inputs and targets; equal at every call."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(2, _BATCH, _WIDTH, generator=generator)
    return inputs, targets


def run_alone(device: str) -> tuple[str, list[Finding]]:
    """Compare a pipeline of two stages in this process with the unsplit model, on `device`."""
    inputs, targets = batch()
    try:
        report = check(
            layers_for(2),
            inputs,
            targets,
            loss=nn.functional.mse_loss,
            num_stages=2,
            num_microbatches=_NUM_MICROBATCHES,
            threads_per_stage=1,
            devices=device,
        )
    except Exception as failure:  # a torch that does not fit the machine fails in ways of its own
        reason = str(failure).strip().partition("\n")[0]
        text = f"{device}: FAILED: {type(failure).__name__}: {reason}"
        return text, [_failed(text)]
    text = f"{device}: {report.verdict}"
    return text, [] if report.equal else [_failed(text)]


def run_together(mesh: Mesh) -> tuple[str, list[Finding]]:
    """Run a training step over the mesh; each rank compares with the unsplit model.

    Gives the same on every rank.

    Raises:
        PeerError: another process failed, or is gone.
    """
    layers, (inputs, targets) = layers_for(mesh.num_stages), batch()
    unsplit = as_layers(copy.deepcopy(layers))
    loss = nn.functional.mse_loss
    pipe = Pipeline(
        layers,
        mesh=mesh,
        partition=[2] * mesh.num_stages,
        num_microbatches=_NUM_MICROBATCHES,
        loss=loss,
        threads_per_stage=1,
    )
    found = pipe.train_step(inputs, targets)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = run_unsplit(unsplit, (inputs, targets), loss, Reduction.MEAN, pipe).tensors
    finally:
        torch.set_num_threads(threads)
    theirs = expected["loss", "loss"]
    assert theirs is not None
    differing = sum(
        not _same(parameter.grad, expected["gradient", name])
        for name, parameter in pipe.named_parameters()
    )
    pipe.close()
    mine = Outcome(float(found), float(theirs), differing)
    return judge(mesh.world.gather(mine, "for the others' losses to compare"))


def judge(everyone: Sequence[Outcome]) -> tuple[str, list[Finding]]:
    """Compare what the ranks got over the mesh with what the unsplit model gives them."""
    losses = {outcome.loss for outcome in everyone}
    if len(losses) == 1 and all(outcome.equal for outcome in everyone):
        return (
            f"EQUAL: {count_text(len(everyone), 'process')}, {_NUM_MICROBATCHES} micro-batches: "
            f"the loss {losses.pop():.6f} is the same on every rank and the unsplit model's, and "
            "so is every gradient; 0 bits differ"
        ), []
    pairs = (f"{o.loss:.9g} ({o.unsplit_loss:.9g}) on rank {r}" for r, o in enumerate(everyone))
    text = f"DIFFERENT: the loss over the mesh (and the unsplit model's) is {', '.join(pairs)}"
    are_close = all(abs(o.loss - o.unsplit_loss) <= _CLOSE * abs(o.loss) for o in everyone)
    if len(losses) == 1 and are_close:
        why = "processors of several kinds round differently; use equal ones where each bit counts"
        return text, [Finding(False, f"the self-test: {text}: {why}")]
    return text, [_failed(text)]


def _same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    return ours is not None and theirs is not None and torch.equal(ours, theirs)


def _failed(text: str) -> Finding:
    return Finding(
        True,
        f"the self-test: {text}. See that this build of torch fits the machine, and report this "
        "with the output of penstock doctor",
    )
