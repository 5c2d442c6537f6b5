"""A GPT trained in plain torch, by Penstock and by its peers, a step at a call, on one device."""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.gpu_campaign.measure import MIB, NUM_WARM_UPS, Step, timed, wait
from penstock import Pipeline, Recompute, schedules
from penstock_recipes.zoo import transformer_lm


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The task: a GPT in one type, `batch` sequences in `num_microbatches`.

    With a `backend` of torch.compile, each block is compiled.
    """

    device: torch.device
    num_layers: int = 24
    width: int = 1024
    num_words: int = 51_200
    length: int = 512
    batch: int = 32
    num_microbatches: int = 8
    dtype: torch.dtype = torch.bfloat16
    dropout: float = 0.0
    backend: str | None = None
    num_steps: int = 10

    @classmethod
    def smallest(cls, device: torch.device) -> "Work":
        """Return one that takes no time on a CPU."""
        sizes: dict[str, Any] = {"num_layers": 2, "width": 16, "num_words": 32, "length": 8}
        sizes |= {"batch": 4, "num_microbatches": 2, "num_steps": 1}
        return cls(device=device, dtype=torch.float32, **sizes)

    def model(self) -> nn.Sequential:
        """Build the model; equal at every call."""
        torch.manual_seed(0)
        with torch.device(self.device):
            made = transformer_lm(
                self.num_layers,
                width=self.width,
                ff_width=4 * self.width,
                num_heads=max(1, self.width // 64),
                num_words=self.num_words,
                max_length=self.length,
                dropout=self.dropout,
            )
        if self.backend is not None:
            for block in list(made)[1:-2]:  # without embedding, norm and head
                block.compile(backend=self.backend)
        return made.to(self.dtype)

    def cut(self, num_stages: int) -> list[int]:
        """Return the number of layers of each stage; embedding, norm and head are layers too."""
        share, rest = divmod(self.num_layers + 3, num_stages)
        return [share + (stage < rest) for stage in range(num_stages)]

    def words(self) -> Tensor:
        """Draw the batch; equal at every call."""
        drawn = torch.Generator().manual_seed(1)
        shape = (self.batch, self.length)
        return torch.randint(self.num_words, shape, generator=drawn).to(self.device)


def loss(logits: Tensor, words: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return cross_entropy(logits.flatten(0, 1).float(), words.flatten())


Make = Callable[[Work], tuple[nn.Module, Step, Callable[[], None]]]
"""Returns the model, what trains it for a step, and what ends that."""


def piped(work: Work, num_stages: int, model: nn.Module | None = None, **options: Any) -> Pipeline:
    """Make a pipeline of the model, or of a `model` that differs; all stages on one device."""
    how: dict[str, Any] = {"devices": str(work.device), "recompute": Recompute.NEVER}
    return Pipeline(
        work.model() if model is None else model,
        partition=work.cut(num_stages),
        num_microbatches=work.num_microbatches,
        loss=loss,
        **how | options,
    )


def plain(work: Work) -> tuple[nn.Module, Step, Callable[[], None]]:
    """Plain torch, micro-batch after micro-batch."""
    model, words = work.model(), work.words()

    def step() -> None:
        for part in words.chunk(work.num_microbatches):
            (loss(model(part), part) / work.num_microbatches).backward()

    return model, step, _nothing


def penstock(num_stages: int, schedule: Any, recompute: Recompute) -> Make:
    """Penstock, all stages on the one device."""

    def make(work: Work) -> tuple[nn.Module, Step, Callable[[], None]]:
        model, words = work.model(), work.words()
        pipe = piped(work, num_stages, model, schedule=schedule, recompute=recompute)
        return model, lambda: pipe.train_step(words, words), pipe.close

    return make


def torchgpipe(num_stages: int) -> Make:
    """The torchgpipe package, all stages on the one device; its loss is over all outputs."""

    def make(work: Work) -> tuple[nn.Module, Step, Callable[[], None]]:
        from torchgpipe import GPipe  # a peer, not a dependency

        model, words = work.model(), work.words()
        pipe = GPipe(
            model,
            work.cut(num_stages),
            devices=[work.device] * num_stages,
            chunks=work.num_microbatches,
            checkpoint="never",
        )
        return model, lambda: loss(pipe(words), words).backward(), _nothing

    return make


def torch_pipelining(work: Work) -> tuple[nn.Module, Step, Callable[[], None]]:
    """torch.distributed.pipelining: one stage, for it wants a process for each."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    folder = tempfile.TemporaryDirectory()
    backend = "nccl" if work.device.type == "cuda" else "gloo"
    where = Path(folder.name) / "meeting"
    dist.init_process_group(backend, f"file://{where}", rank=0, world_size=1)
    model, words = work.model(), work.words()
    stage = PipelineStage(model, 0, 1, work.device)
    schedule = ScheduleGPipe(stage, work.num_microbatches, loss_fn=loss)

    def close() -> None:
        dist.destroy_process_group()
        folder.cleanup()

    return model, lambda: schedule.step(words, target=words), close


def _nothing() -> None:
    """Nothing was started."""


_NEVER, _STAGE = Recompute.NEVER, Recompute.STAGE
CONTESTANTS: dict[str, Make] = {
    "plain torch": plain,
    "Penstock, K = 1": penstock(1, schedules.gpipe, _NEVER),
    "Penstock, K = 4, GPipe": penstock(4, schedules.gpipe, _NEVER),
    "Penstock, K = 4, 1F1B": penstock(4, schedules.one_f_one_b, _NEVER),
    "Penstock, K = 4, GPipe, recompute": penstock(4, schedules.gpipe, _STAGE),
    "torchgpipe, K = 1": torchgpipe(1),
    "torchgpipe, K = 4": torchgpipe(4),
    "torch.distributed.pipelining, K = 1": torch_pipelining,
}


class Contest:
    """Those that can run here, and what they took; each round is a step of each."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.missing: dict[str, str] = {}
        self._steps: dict[str, tuple[nn.Module, Step]] = {}
        self._close: list[Callable[[], None]] = []
        self.seconds: dict[str, list[float]] = {}
        self.peak_mib: dict[str, float] = {}
        for name, make in CONTESTANTS.items():
            try:
                model, step, close = make(work)
            except ImportError:
                self.missing[name] = "not installed"
                continue
            self._close.append(close)
            self._steps[name] = model, step
            try:
                for _ in range(NUM_WARM_UPS):
                    self._timed(model, step)
            except Exception as error:  # a peer may not know this model, or this torch
                self.missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                del self._steps[name]

    def run(self, until: float) -> None:
        """Run rounds until a time of `time.monotonic`; at least one."""
        while True:
            for name, (model, step) in self._steps.items():
                self.seconds.setdefault(name, []).append(self._timed(model, step))
            if time.monotonic() > until:
                return

    def _timed(self, model: nn.Module, step: Step) -> float:
        return timed(model, step, self._work.device)[1] / 1000

    def measure_memory(self) -> None:
        """Note how much more than before a step holds at its peak, gradients included."""
        if self._work.device.type != "cuda":
            return
        for name, (model, step) in self._steps.items():
            model.zero_grad()
            wait(self._work.device)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self._timed(model, step)
            self.peak_mib[name] = (torch.cuda.max_memory_allocated() - before) / MIB
            model.zero_grad()

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each: its median, and the median of its ratios to plain torch."""
        first = self.seconds.get("plain torch", [])
        for name in CONTESTANTS:
            if name in self.missing:
                yield {"name": name, "remark": self.missing[name]}
                continue
            own = self.seconds[name]
            ratio = median(a / b for a, b in zip(own, first, strict=False))
            peak = self.peak_mib.get(name)
            step_ms = 1000 * median(own)
            yield {"name": name, "step_ms": step_ms, "ratio": ratio, "peak_mib": peak}

    def close(self) -> None:
        """End all, and free the memory."""
        for close in self._close:
            close()
        self._steps.clear()
        gc.collect()
