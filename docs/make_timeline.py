"""Measure one training step and draw it: the picture in the README.

Usage: python docs/make_timeline.py [FILE]
"""

import sys
from pathlib import Path

import torch
from torch import nn

from penstock import Pipeline
from penstock.schedules import one_f_one_b
from penstock.trace import save_picture


def main() -> None:
    """Train a few steps of a small convolution network as a pipeline; draw the last one."""
    torch.manual_seed(0)
    width = 32
    blocks = [
        nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        for _ in range(8)
    ]
    images, targets = torch.randn(64, width, 48, 48), torch.randn(64, width, 48, 48)
    with Pipeline(
        blocks,
        partition=[4, 4],
        num_microbatches=8,
        loss=nn.MSELoss(),
        schedule=one_f_one_b,
        threads_per_stage=1,
        trace=True,
    ) as pipe:
        for _ in range(5):
            pipe.train_step(images, targets)
        assert pipe.last_timeline is not None
        file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("timeline.png")
        save_picture(pipe.last_timeline, file)


if __name__ == "__main__":
    main()
