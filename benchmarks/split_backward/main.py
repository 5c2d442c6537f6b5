"""What a backward in two parts costs beside the whole one, on one micro-batch of one stage."""

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.report import Column, Load, Report, interleaved, parser, progress, publish
from benchmarks.split_backward.ways import WAYS, Taken, bytes_between
from penstock.runtime.construction import keep_freed_memory
from penstock_recipes.zoo import gpt

TARGET_PERCENT = 5.0

COLUMNS = (
    Column("stack", "stack"),
    Column("backward", "way"),
    Column("I: ms", "input_ms", ".2f"),
    Column("W: ms", "weight_ms", ".2f"),
    Column("total: ms", "total_ms", ".2f"),
    Column("beyond the whole: %", "percent", ".1f"),
    Column("quartiles: %", "quartiles"),
    Column("with the forward: %", "percent_of_both", ".1f"),
    Column("kept after I: KiB", "kept_kib", ",.0f"),
)


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers of a stage, and the shape of a micro-batch."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


def encoder(num_layers: int, width: int) -> nn.Module:
    """Build layers of torch's encoder."""
    make = partial(nn.TransformerEncoderLayer, width, 4, 4 * width, dropout=0.0, batch_first=True)
    return nn.Sequential(*(make() for _ in range(num_layers)))


def decoder(num_layers: int, width: int) -> nn.Module:
    """Build the blocks of a GPT."""
    model = gpt(num_layers=num_layers, width=width, num_heads=4, num_words=64, dropout=0.0)
    return nn.Sequential(*model.blocks)


def convolutions(num_layers: int, width: int) -> nn.Module:
    """Build convolutions with BatchNorm and ReLU."""
    layers: list[nn.Module] = []
    for _ in range(num_layers):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers)


def perceptron(num_layers: int) -> nn.Module:
    """Build wide linear layers."""
    layers: list[nn.Module] = []
    for _ in range(num_layers):
        layers += [nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)]
    return nn.Sequential(*layers)


def tiny(num_layers: int) -> nn.Module:
    """Build linear layers that take no time."""
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(num_layers)))


def stacks(num_layers: int) -> list[Stack]:
    """List what is measured."""
    half, quarter = max(num_layers // 2, 1), max(num_layers // 4, 1)
    return [
        Stack("encoder d256", partial(encoder, num_layers, 256), (4, 64, 256)),
        Stack("GPT d256", partial(decoder, num_layers, 256), (4, 64, 256)),
        Stack("encoder d512", partial(encoder, half, 512), (4, 64, 512)),
        Stack("GPT d512", partial(decoder, half, 512), (4, 64, 512)),
        Stack("encoder d768", partial(encoder, quarter, 768), (4, 64, 768)),
        Stack("GPT d768", partial(decoder, quarter, 768), (4, 64, 768)),
        Stack("conv 64, BatchNorm", partial(convolutions, num_layers, 64), (4, 64, 28, 28)),
        Stack("conv 256, BatchNorm", partial(convolutions, half, 256), (4, 256, 14, 14)),
        Stack("MLP 512-2048", partial(perceptron, half), (256, 512)),
        Stack("tiny: Linear(32)", partial(tiny, num_layers), (8, 32)),
    ]


def measure(stack: Stack, rounds: int) -> list[dict[str, Any]]:
    """Time all ways in turn; gradients add up, as those of all micro-batches but the first do."""
    torch.manual_seed(0)
    model, x = stack.make(), torch.randn(stack.shape)
    gradient = torch.randn_like(model(x))
    runs = [partial(way, model, x, gradient) for way in WAYS.values()]
    found = dict(zip(WAYS, interleaved(runs, rounds), strict=True))
    return [
        row(stack.name, name, taken, found["whole"])
        | {"kept_kib": bytes_between(WAYS[name], model, x, gradient) / 1024}
        for name, taken in found.items()
    ]


def row(
    stack: str, way: str, taken: tuple[Taken, ...], whole: tuple[Taken, ...]
) -> dict[str, Any]:
    """Compare a way with the whole backward, round by round."""
    beyond = sorted(100 * (t.total_s / w.total_s - 1) for t, w in zip(taken, whole, strict=True))
    both = [
        100 * ((t.forward_s + t.total_s) / (w.forward_s + w.total_s) - 1)
        for t, w in zip(taken, whole, strict=True)
    ]
    low, high = beyond[len(beyond) // 4], beyond[3 * len(beyond) // 4]
    return {
        "stack": stack,
        "way": way,
        "input_ms": 1e3 * median(t.input_s for t in taken),
        "weight_ms": 1e3 * median(t.weight_s for t in taken),
        "total_ms": 1e3 * median(t.total_s for t in taken),
        "percent": median(beyond),
        "quartiles": f"{low:.1f} to {high:.1f}",
        "percent_of_both": median(both),
    }


def run(options: argparse.Namespace) -> Report:
    """Measure every stack."""
    load = Load.now()
    torch.set_num_threads(1)
    keep_freed_memory()  # as every pipeline does
    gc.freeze()  # or a full collection walks through all that torch's import made
    num_layers, rounds = (1, 1) if options.smallest else (options.layers, options.rounds)
    rows: list[dict[str, Any]] = []
    for stack in stacks(num_layers):
        progress(stack.name)
        rows += measure(stack, rounds)
    settings = {"layers": num_layers, "rounds": rounds, "load before": f"{load.before:.2f}"}
    return Report(COLUMNS, tuple(rows), settings, (verdict(rows), *load.notes))


def verdict(rows: list[dict[str, Any]]) -> str:
    """Compare Penstock's two parts with the target."""
    ours = [r for r in rows if r["way"] == "Penstock" and not r["stack"].startswith("tiny")]
    said = ", ".join(f"{r['stack']} {r['percent']:.1f} %" for r in ours)
    within = sum(r["percent"] <= TARGET_PERCENT for r in ours)
    return (
        f"Penstock's two parts beside the whole backward: {said}; within {TARGET_PERCENT:.0f} % "
        f"in {within} of {len(ours)}."
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=60, help="after one of warm-up")
    options.add_argument("--layers", type=int, default=8)
    chosen = options.parse_args(arguments)
    publish(run(chosen), chosen, Path(__file__).parent)


if __name__ == "__main__":
    main()
