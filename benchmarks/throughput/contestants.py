"""Who runs: each contestant trains the same model on the same batch, one step at a call."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.blocks import transformer
from penstock import Pipeline, Recompute, schedules

NUM_STAGES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What all contestants do: 8 blocks on `batch` sequences of `tokens` tokens."""

    dim: int = 256
    num_heads: int = 4
    batch: int = 32
    tokens: int = 64
    num_blocks: int = 8

    def model(self) -> nn.Sequential:
        """Build the model; equal at every call."""
        return transformer(self.num_blocks, self.dim, self.num_heads)

    def data(self) -> tuple[Tensor, Tensor]:
        """Draw inputs and targets, each (batch, tokens, dim); equal at every call."""
        generator = torch.Generator().manual_seed(1)
        shape = (2, self.batch, self.tokens, self.dim)
        inputs, targets = torch.randn(shape, generator=generator)
        return inputs, targets

    @property
    def per_stage(self) -> list[int]:
        """Layers of each stage."""
        return [self.num_blocks // NUM_STAGES] * NUM_STAGES


class Contestant(Protocol):
    """One way to run a training step."""

    name: str

    def step(self) -> float:
        """Run zero_grad and one training step; give the seconds it took."""

    def close(self) -> None:
        """End what it started."""


class InProcess:
    """A contestant of this process: a model and a function that runs a step of it."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        run_step: Callable[[], Any],
        close: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._model, self._run_step, self._close = model, run_step, close

    def step(self) -> float:
        start_s = time.perf_counter()
        self._model.zero_grad()
        self._run_step()
        return time.perf_counter() - start_s

    def close(self) -> None:
        if self._close is not None:
            self._close()


def plain(work: Work, num_microbatches: int) -> InProcess:
    """Plain torch on one thread: micro-batch after micro-batch, forward then backward."""
    model = work.model()
    inputs, targets = work.data()

    def run_step() -> None:
        for x, y in zip(
            inputs.tensor_split(num_microbatches),
            targets.tensor_split(num_microbatches),
            strict=True,
        ):
            (mse_loss(model(x), y) * (len(x) / len(inputs))).backward()

    return InProcess("plain torch, 1 thread", model, run_step)


def penstock(work: Work, num_microbatches: int, schedule: Any, name: str) -> InProcess:
    """Penstock: a worker thread for each stage, each with one intra-op thread."""
    pipe = Pipeline(
        work.model(),
        partition=work.per_stage,
        num_microbatches=num_microbatches,
        loss=mse_loss,
        schedule=schedule,
        recompute=Recompute.NEVER,
        threads_per_stage=1,
        devices="cpu",
    )
    inputs, targets = work.data()
    return InProcess(name, pipe, lambda: pipe.train_step(inputs, targets), pipe.close)


def torchgpipe(work: Work, num_microbatches: int) -> InProcess:
    """The torchgpipe package, without checkpointing; its loss is over the gathered output."""
    from torchgpipe import GPipe  # a peer, not a dependency

    model = GPipe(
        work.model(),
        work.per_stage,
        devices=["cpu"] * NUM_STAGES,
        chunks=num_microbatches,
        checkpoint="never",
    )
    inputs, targets = work.data()
    return InProcess("torchgpipe", model, lambda: mse_loss(model(inputs), targets).backward())


def in_process(work: Work, num_microbatches: int, *, with_torchgpipe: bool) -> list[InProcess]:
    """Give the contestants of this process; plain torch first."""
    found = [
        plain(work, num_microbatches),
        penstock(work, num_microbatches, schedules.gpipe, "Penstock gpipe"),
        penstock(work, num_microbatches, schedules.one_f_one_b, "Penstock one_f_one_b"),
    ]
    return [*found, torchgpipe(work, num_microbatches)] if with_torchgpipe else found
