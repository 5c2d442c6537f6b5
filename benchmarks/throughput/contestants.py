"""Who runs: each contestant trains the same model on the same batch, one step at a call."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.blocks import transformer
from benchmarks.traced_costs import WHOLE_AND_DIVIDED, traced_costs
from penstock import Pipeline, Recompute, schedules
from penstock.schedules import Family
from penstock.schedules.costs import Costs
from penstock.simulator import simulate

NUM_STAGES = 2
MOST_ERROR = 1e-4
"""Of a gradient, relative to its largest value: orders of addition differ, and nothing else."""
Gradients = dict[str, Tensor]
"""The gradient of every parameter, by the name it has in the unsplit model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What all contestants do: 8 blocks on `batch` sequences of `tokens` tokens.

    `costs` are those of each stage by the numbers of micro-batches and of stages.
    """

    dim: int = 256
    num_heads: int = 4
    batch: int = 32
    tokens: int = 64
    num_blocks: int = 8
    costs: Mapping[tuple[int, int], Costs] = field(default_factory=dict)

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
        """Layers of each stage, one on each rank."""
        return self.cut(1)

    def cut(self, stages_per_rank: int) -> list[int]:
        """Give the layers of each stage."""
        num_stages = NUM_STAGES * stages_per_rank
        return [self.num_blocks // num_stages] * num_stages


class Contestant(Protocol):
    """One way to run a training step."""

    @property
    def name(self) -> str:
        """What the table calls it."""

    def step(self) -> float:
        """Run zero_grad and one training step; give the seconds it took."""

    def gradients(self) -> Gradients:
        """Give what the last step left."""

    def close(self) -> None:
        """End what it started."""


def gradients_of(layers: Mapping[int, nn.Module]) -> Gradients:
    """Give the gradients of layers, which are known by their places in the model."""
    return {
        f"{place}.{name}": parameter.grad
        for place, layer in layers.items()
        for name, parameter in layer.named_parameters()
        if parameter.grad is not None
    }


class InProcess:
    """A contestant of this process: a model and a function that runs a step of it."""

    def __init__(
        self,
        name: str,
        model: nn.Sequential,
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

    def gradients(self) -> Gradients:
        return gradients_of(dict(enumerate(self._model)))

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


@dataclass(frozen=True, slots=True)
class Way:
    """A schedule of Penstock's: what makes it of its stages' costs, and how many a rank has."""

    family: Callable[[Costs], Family]
    stages_per_rank: int = 1

    def schedule(self, work: Work, num_microbatches: int) -> Family:
        """Make the schedule for what was measured."""
        num_stages = NUM_STAGES * self.stages_per_rank
        return self.family(work.costs[num_microbatches, num_stages])

    def predicted_s(self, work: Work, num_microbatches: int) -> float:
        """Simulate a step of it."""
        num_stages = NUM_STAGES * self.stages_per_rank
        made = self.schedule(work, num_microbatches)(num_stages, num_microbatches)
        return float(simulate(made, work.costs[num_microbatches, num_stages]).step_s)


def _searched(costs: Costs) -> Family:
    return schedules.searched(costs, like=schedules.zb_v())


WAYS = {
    "gpipe": Way(lambda _: schedules.gpipe),
    "one_f_one_b": Way(lambda _: schedules.one_f_one_b),
    "eager_1f1b": Way(lambda _: schedules.eager_1f1b),
    "interleaved_1f1b": Way(lambda _: schedules.interleaved_1f1b(stages_per_rank=2), 2),
    "zb_h1": Way(schedules.zb_h1),
    "zb_h2": Way(schedules.zb_h2),
    "zb_v": Way(schedules.zb_v, 2),
    "searched": Way(_searched, 2),
}


def measured(work: Work, num_microbatches: int) -> dict[tuple[int, int], Costs]:
    """Measure what the stages take in pipelines, cut into one for each rank and into two."""
    found = {}
    for per_rank, families in WHOLE_AND_DIVIDED.items():
        whole, divided = (_traced(work, num_microbatches, f, per_rank) for f in families)
        found[num_microbatches, NUM_STAGES * per_rank] = traced_costs(whole, divided, work.data())
        whole.close()
        divided.close()
    return found


def _traced(work: Work, num_microbatches: int, family: Family, per_rank: int) -> Pipeline:
    return Pipeline(
        work.model(),
        partition=work.cut(per_rank),
        num_microbatches=num_microbatches,
        loss=mse_loss,
        schedule=family,
        recompute=Recompute.NEVER,
        threads_per_stage=1,
        devices="cpu",
        trace=True,
    )


def penstock(work: Work, num_microbatches: int, name: str) -> InProcess:
    """Penstock: a worker thread for each rank's stages, with one intra-op thread."""
    model, way = work.model(), WAYS[name]
    pipe = Pipeline(
        model,
        partition=work.cut(way.stages_per_rank),
        num_microbatches=num_microbatches,
        loss=mse_loss,
        schedule=way.schedule(work, num_microbatches),
        recompute=Recompute.NEVER,
        threads_per_stage=1,
        devices="cpu",
    )
    inputs, targets = work.data()
    title = f"Penstock {name}, threads"
    return InProcess(title, model, lambda: pipe.train_step(inputs, targets), pipe.close)


def torchgpipe(work: Work, num_microbatches: int) -> InProcess:
    """The torchgpipe package, without checkpointing; its loss is over the gathered output."""
    from torchgpipe import GPipe  # a peer, not a dependency

    model = work.model()
    pipe = GPipe(
        model,
        work.per_stage,
        devices=["cpu"] * NUM_STAGES,
        chunks=num_microbatches,
        checkpoint="never",
    )
    inputs, targets = work.data()
    return InProcess("torchgpipe", model, lambda: mse_loss(pipe(inputs), targets).backward())


def in_process(work: Work, num_microbatches: int, *, with_torchgpipe: bool) -> list[InProcess]:
    """Give the contestants of this process; plain torch first."""
    found = [
        plain(work, num_microbatches),
        *(penstock(work, num_microbatches, name) for name in WAYS),
    ]
    return [*found, torchgpipe(work, num_microbatches)] if with_torchgpipe else found


def check(contestants: Sequence[Contestant]) -> None:
    """Run two steps of each, and compare what the second one left with the first contestant's.

    Raises:
        AssertionError: a contestant computes something else.
    """
    expected: Gradients = {}
    for contestant in contestants:
        contestant.step()
        contestant.step()
        found = contestant.gradients()
        expected = expected or {name: gradient.clone() for name, gradient in found.items()}
        if expected.keys() != found.keys():
            lacking = ", ".join(sorted(expected.keys() ^ found.keys()))
            raise AssertionError(
                f"{contestant.name} has no gradient of, or one too many: {lacking}"
            )
        for name, gradient in found.items():
            scale = float(expected[name].abs().max())
            error = float((gradient - expected[name]).abs().max())
            if not error <= MOST_ERROR * scale:
                raise AssertionError(
                    f"{contestant.name} computes another gradient of {name} than "
                    f"{contestants[0].name}: off by {error:.1e}, its values are up to {scale:.1e}"
                )
