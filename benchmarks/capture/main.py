"""What a captured model costs: to capture, to tell stages of, and to run beside its blocks."""

import argparse
import gc
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from penstock.model.ghost.cut import Cut
from penstock.model.ghost.inputs import as_call
from penstock.model.ghost.layers import CapturedLayers
from penstock.model.ghost.values import EventKey, Header, ValueId

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


def measure(example: Example, rounds: int) -> dict[str, Any]:
    """Capture a model; run its stages one after the other, and see what their blocks took."""
    model, inputs = example.make()
    start_s = time.perf_counter()
    layers = capture(model, inputs, check=False)
    capture_s = time.perf_counter() - start_s
    assert isinstance(layers, CapturedLayers)
    row: dict[str, Any] = {
        "name": example.name,
        "parameters": sum(layers.captured.sizes.values()),
        "calls": len(layers),
        "capture_ms": capture_s * 1e3,
        "live_bytes": _at_cuts(layers),
    }
    if any(p.is_meta for p in model.parameters()):
        return row
    start_s = time.perf_counter()
    capture(model, inputs)  # the cache is empty: see `main`
    row["check_ms"] = (time.perf_counter() - start_s - capture_s) * 1e3
    model.eval()
    gc.collect()
    gc.freeze()  # or a full collection walks through all that the imports and the model made
    cut, header_bytes = Cut(layers.captured, _partition(len(layers))), 0
    with torch.no_grad():
        for n in range(rounds + 1):
            chain = _Chain(cut, inputs)
            header_bytes = chain.header_bytes
            if n:
                row.setdefault("extra_s", []).append(chain.extra_s / NUM_STAGES)
                row.setdefault("own_s", []).append(_own_s(model, inputs, layers))
    return row | {
        "header_bytes": header_bytes,
        "extra_ms": median(row["extra_s"]) * 1e3,
        "own_ms": median(row["own_s"]) * 1e3,
    }


def _partition(num_layers: int) -> tuple[int, ...]:
    ends = [num_layers * (stage + 1) // NUM_STAGES for stage in range(NUM_STAGES)]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def _at_cuts(layers: CapturedLayers) -> float:
    """Give the mean of the bytes that live at the cuts."""
    live, starts = layers.captured.live_bytes(), list(accumulate(_partition(len(layers))))[:-1]
    return sum(live[start] for start in starts) / len(starts)


class _Chain:
    """One pass of all stages, in turn: what they took beyond the calls of blocks."""

    def __init__(self, cut: Cut, inputs: Any) -> None:
        self.extra_s, self.header_bytes = 0.0, 0
        args, kwargs = as_call(inputs)
        header: Header = {}
        waiting: dict[int, dict[ValueId, Tensor]] = {}
        for stage in range(cut.num_stages):
            start_s = time.perf_counter()
            replay = cut.replay(stage, waiting.pop(stage, {}), header, self._timed)
            cut.run(replay, args, kwargs)
            sent = cut.sent_on(replay, stage)
            self.extra_s += time.perf_counter() - start_s
            header = replay.header
            if stage < cut.num_stages - 1:
                told = len(pickle.dumps(cut.sealed(stage, header)))
                self.header_bytes = max(self.header_bytes, told)
            for peer, values in sent.items():
                waiting.setdefault(peer, {}).update(values)

    def _timed(self, key: EventKey, function: Callable[[], Any]) -> Any:
        start_s = time.perf_counter()
        result = function()
        self.extra_s -= time.perf_counter() - start_s
        return result


def _own_s(model: nn.Module, inputs: Any, layers: CapturedLayers) -> float:
    """Give what the plain model takes beyond its blocks, once."""
    spent_s = [0.0]

    def enter(*_: Any) -> None:
        spent_s[0] += time.perf_counter()

    def leave(*_: Any) -> None:
        spent_s[0] -= time.perf_counter()

    handles = []
    for block in layers.captured.blocks.values():
        handles += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
    args, kwargs = as_call(inputs)
    start_s = time.perf_counter()
    model(*args, **kwargs)
    total_s = time.perf_counter() - start_s
    for handle in handles:
        handle.remove()
    return total_s + spent_s[0]


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
    rows = []
    for example in models:
        progress(example.name)
        rows.append(measure(example, rounds))
    taken = "; ".join(f"{row['name']}: {row['extra_ms']:.3f} ms" for row in rows[:2])
    notes = (
        f"Beyond its blocks a stage takes, a micro-batch, {taken} (target {TARGET_MS}).",
        against_sequential(options, rounds),
    )
    settings = {"K": NUM_STAGES, "rounds": rounds, "load before": f"{load.before:.2f}"}
    return Report(COLUMNS, tuple(rows), settings, (*notes, *load.notes))


@contextmanager
def empty_cache() -> Iterator[None]:
    """Let nothing have been checked before."""
    before = os.environ.get("PENSTOCK_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PENSTOCK_CACHE"] = folder
        try:
            yield
        finally:
            del os.environ["PENSTOCK_CACHE"]
            if before is not None:
                os.environ["PENSTOCK_CACHE"] = before


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=30, help="after one of warm-up")
    chosen = options.parse_args(arguments)
    with empty_cache():
        publish(run(chosen), chosen, Path(__file__).parent)


if __name__ == "__main__":
    main()
