"""What a pipeline adds to a small layer, with a dropout module in it and without."""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss

from benchmarks.report import interleaved
from penstock import Pipeline, Recompute, Transport

WIDTH, SAMPLES, NUM_LAYERS, NUM_MICROBATCHES = 64, 4, 4, 16
TARGET_PERCENT = 45.0


class SmallLayer(nn.Module):
    """The feed-forward half of a transformer block."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(rate) if rate else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Add what the layer computes to its input."""
        y: Tensor = self.dropout(self.narrow(gelu(self.widen(self.norm(x)))))
        return x + y


def layers(rate: float) -> list[nn.Module]:
    """Build the layers."""
    return [SmallLayer(rate) for _ in range(NUM_LAYERS)]


def plain_loop(model: nn.Module, data: Tensor) -> None:
    """Run forward, loss and backward of each micro-batch in plain torch."""
    for x in data.tensor_split(NUM_MICROBATCHES):
        (mse_loss(model(x), x) * (1 / NUM_MICROBATCHES)).backward()


def cpu_s(function: Callable[[], Any]) -> float:
    """Time one call, by what all threads spent on a core."""
    start_s = time.process_time()
    function()
    return time.process_time() - start_s


def overhead_percent(rate: float, rounds: int) -> float:
    """Measure a step against the plain loop, in one stage on the calling thread."""
    data = torch.randn(SAMPLES * NUM_MICROBATCHES, WIDTH)
    with Pipeline(
        layers(rate),
        num_stages=1,
        num_microbatches=NUM_MICROBATCHES,
        loss=mse_loss,
        recompute=Recompute.NEVER,
        transport=Transport.LOOPBACK,
        threads_per_stage=1,
    ) as pipe:
        step, own = interleaved(
            [
                partial(cpu_s, partial(pipe.train_step, data, data)),
                partial(cpu_s, partial(plain_loop, nn.Sequential(*layers(rate)), data)),
            ],
            rounds,
        )
    return 100 * (median(s / o for s, o in zip(step, own, strict=True)) - 1)


def verdict(rounds: int) -> str:
    """Measure with and without dropout; say what both are."""
    without, with_dropout = (overhead_percent(rate, rounds) for rate in (0.0, 0.1))
    return (
        f"A small layer (LayerNorm, {WIDTH} to {4 * WIDTH} to {WIDTH}, {SAMPLES} samples) costs "
        f"{without:.0f} % above plain torch, with a dropout module in it {with_dropout:.0f} %; "
        f"the target for both is {TARGET_PERCENT:.0f} %."
    )


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=200, help="after one of warm-up")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sys.stdout.write(verdict(options.parse_args().rounds) + "\n")


if __name__ == "__main__":
    main()
