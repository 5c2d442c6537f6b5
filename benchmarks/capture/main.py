"""What a captured model costs: to capture, to tell stages of, and to run beside its blocks."""

import argparse
import gc
import pickle
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.blocks import Block
from benchmarks.capture.models import MODELS, Decoder, Example
from benchmarks.report import Column, Load, Report, interleaved, parser, progress, publish
from penstock import Pipeline, capture, schedules
from penstock.model.capture.captured import Captured
from penstock.model.capture.events import EventKey, SealedHeader, ValueId
from penstock.model.capture.ghost import CURRENT
from penstock.model.capture.inputs import as_call
from penstock.model.capture.source import CapturedLayers
from penstock.model.capture.stages import CutModel
from penstock.model.capture.watch import watch
from penstock.model.layers import Layers

TARGET_MS = 0.3
TARGET_RATIO = 0.97
NUM_STAGES = 3
NUM_MICROBATCHES = 8

COLUMNS = (
    Column("model", "name"),
    Column("parameters", "parameters", ","),
    Column("block calls", "calls"),
    Column("capture: ms", "capture_ms", ".0f"),
    Column("check: ms", "check_ms", ".0f"),
    Column("header: bytes", "header_bytes", ",.0f"),
    Column("live at a cut: bytes", "live_bytes", ",.0f"),
    Column("beyond its blocks: ms", "extra_ms", ".3f"),
    Column("of it the model's own: ms", "own_ms", ".3f"),
)


def _captured(layers: Layers) -> Captured:
    assert isinstance(layers, CapturedLayers)
    return layers.captured


class Measured:
    """A model's row of the table: what it cost to capture, and what its rounds show."""

    def __init__(self, example: Example) -> None:
        self.model, self.inputs = example.make()
        start_s = time.perf_counter()
        layers = capture(self.model, self.inputs, check=False)
        capture_s = time.perf_counter() - start_s
        captured = _captured(layers)
        self.row: dict[str, Any] = {
            "name": example.name,
            "parameters": sum(captured.sizes.values()),
            "calls": len(layers),
            "capture_ms": capture_s * 1e3,
            "live_bytes": _at_cuts(layers),
        }
        self.has_weights = not any(p.is_meta for p in self.model.parameters())
        self._extra_s: list[float] = []
        self._own_s: list[float] = []
        self._cut = CutModel(captured, _partition(len(layers)))
        if self.has_weights:
            start_s = time.perf_counter()
            capture(self.model, self.inputs)
            self.row["check_ms"] = (time.perf_counter() - start_s - capture_s) * 1e3
            self.model.eval()

    @torch.no_grad()
    def run(self) -> None:
        """Run its stages in turn, and the plain model; keep the second time of each."""
        for kept in (False, True):
            chain, plain = _Chain(self._cut, self.inputs), _Plain(self._cut, self.inputs)
            if kept:
                self._extra_s.append(chain.extra_s / NUM_STAGES)
                self._own_s.append(plain.extra_s)
                self.row["header_bytes"] = chain.header_bytes
                self.row["extra_ms"] = median(self._extra_s) * 1e3
                self.row["own_ms"] = median(self._own_s) * 1e3


def _partition(num_layers: int) -> tuple[int, ...]:
    ends = [num_layers * (stage + 1) // NUM_STAGES for stage in range(NUM_STAGES)]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def _at_cuts(layers: Layers) -> float:
    """Give the mean of the bytes that live at the cuts."""
    live, starts = _captured(layers).live_bytes(), list(accumulate(_partition(len(layers))))[:-1]
    return sum(live[start] for start in starts) / len(starts)


class _Chain:
    """One pass of all stages, in turn: what they took beyond the calls of blocks."""

    def __init__(self, cut: CutModel, inputs: Any) -> None:
        self.extra_s, self.header_bytes = 0.0, 0
        args, kwargs = as_call(inputs)
        told: SealedHeader | None = None
        waiting: dict[int, dict[ValueId, Tensor]] = {}
        for stage in range(cut.num_stages):
            start_s = time.perf_counter()
            received = waiting.pop(stage, {})
            ran = cut.run_stage(stage, (args, kwargs), received, told, self._timed)
            self.extra_s += time.perf_counter() - start_s
            told = ran.told
            if told is not None:
                self.header_bytes = max(self.header_bytes, len(pickle.dumps(told)))
            for peer, values in ran.sent.items():
                waiting.setdefault(peer, {}).update(values)

    def _timed(self, key: EventKey, function: Callable[[], Any]) -> Any:
        start_s = time.perf_counter()
        result = function()
        self.extra_s -= time.perf_counter() - start_s
        return result


class _Plain:
    """Stands where a pass does while the plain model runs: what it takes beyond its blocks."""

    is_inside = False

    def __init__(self, cut: CutModel, inputs: Any) -> None:
        self._names = watch(cut.captured.blocks)
        args, kwargs = as_call(inputs)
        token = CURRENT.set(self)  # type: ignore[arg-type]  # as much of a pass as blocks ask
        start_s = time.perf_counter()
        try:
            self.blocks_s = 0.0
            cut.captured.model(*args, **kwargs)
        finally:
            self.extra_s = time.perf_counter() - start_s - self.blocks_s
            CURRENT.reset(token)

    def knows(self, module: nn.Module) -> bool:
        """Whether a module is one of the blocks."""
        return id(module) in self._names

    def block_call(
        self, _: nn.Module, native: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a block, timed."""
        self.is_inside = True
        start_s = time.perf_counter()
        result = native(*args, **kwargs)
        self.blocks_s += time.perf_counter() - start_s
        self.is_inside = False
        return result


def against_sequential(options: argparse.Namespace, rounds: int) -> str:
    """Train one decoder captured and as an nn.Sequential; compare the steps."""
    width, depth = (16, 2) if options.smallest else (256, 8)
    samples, length = NUM_MICROBATCHES * (1 if options.smallest else 4), 64
    decoder = Decoder([Block(width, 4) for _ in range(depth)], width)
    words = torch.randint(0, decoder.num_words, (samples, length))
    chain = nn.Sequential(decoder.embed, *decoder.blocks, decoder.norm, decoder.head)
    partition = [1 + depth // 2, depth - depth // 2 + 2]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output.flatten(0, 1), target.flatten())

    def step(pipe: Pipeline) -> float:
        start_s = time.perf_counter()
        pipe.train_step(words, words)
        return time.perf_counter() - start_s

    pipes = [
        Pipeline(
            layers,
            partition=partition,
            num_microbatches=NUM_MICROBATCHES,
            loss=loss,
            schedule=schedules.one_f_one_b,
            threads_per_stage=1,
        )
        for layers in (capture(decoder, words[:1], check=False), chain)
    ]
    captured, plain = interleaved([partial(step, pipe) for pipe in pipes], rounds)
    ratio = median(p / c for p, c in zip(plain, captured, strict=True))
    return (
        f"A decoder of {depth} blocks of width {width}, K = 2, M = {NUM_MICROBATCHES}: captured "
        f"{median(captured) * 1e3:.1f} ms a step, the same blocks as an nn.Sequential "
        f"{median(plain) * 1e3:.1f} ms; throughput {ratio:.3f} of the Sequential's, by rounds "
        f"(target {TARGET_RATIO})."
    )


def run(options: argparse.Namespace) -> Report:
    """Measure every model."""
    load = Load.now()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rounds = 1 if options.smallest else options.rounds
    models = MODELS[:2] if options.smallest else MODELS
    measured = []
    for example in models:
        progress(example.name)
        measured.append(Measured(example))
    gc.collect()
    gc.freeze()  # or a full collection walks through all that the imports and the models made
    for _ in range(rounds):
        for one in measured:
            if one.has_weights:
                one.run()
    rows = [one.row for one in measured]
    taken = "; ".join(f"{row['name']}: {row['extra_ms']:.3f} ms" for row in rows[:2])
    notes = (
        f"Beyond its blocks a stage takes, a micro-batch, {taken} (target {TARGET_MS}).",
        against_sequential(options, rounds),
    )
    settings = {"K": NUM_STAGES, "rounds": rounds, "load before": f"{load.before:.2f}"}
    return Report(COLUMNS, tuple(rows), settings, (*notes, *load.notes))


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=100, help="of all models")
    chosen = options.parse_args(arguments)
    publish(run(chosen), chosen, Path(__file__).parent)


if __name__ == "__main__":
    main()
