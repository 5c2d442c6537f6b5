"""Weights and gradients of several precisions: time, memory, and the loss after equal steps."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.optim import AdamW, Optimizer

from benchmarks.gpu_campaign.contestants import Work, piped
from benchmarks.gpu_campaign.measure import NUM_WARM_UPS, Memory, Row, medians, rows_of
from penstock import MainWeights, Pipeline
from penstock.schedules import one_f_one_b

LEARNING_RATE = 1e-4
Make = Callable[[Pipeline], Optimizer]


def rows(work: Work, until: float) -> Iterator[Row]:
    """Yield a row for each precision; all take equal steps of AdamW on one batch."""
    float32, bfloat16 = (replace(work, dtype=d) for d in (torch.float32, torch.bfloat16))
    autocast = torch.autocast(work.device.type, torch.bfloat16)
    cases = {
        "bf16 weights, fp32 gradients, MainWeights": partial(
            _row, bfloat16, _main_weights, gradient_dtype=torch.float32
        ),
        "bf16 autocast": partial(_row, float32, _adamw, autocast),
        "fp32": partial(_row, float32, _adamw),
    }
    return rows_of(cases, until)


def _adamw(pipe: Pipeline) -> Optimizer:
    return AdamW(pipe.parameters(), lr=LEARNING_RATE)


def _main_weights(pipe: Pipeline) -> Optimizer:
    return MainWeights(AdamW, pipe.parameters(), lr=LEARNING_RATE)


def _row(
    work: Work,
    make: Make,
    autocast: AbstractContextManager[Any] | None = None,
    **options: Any,
) -> Row:
    """Train for the warm-ups and `num_steps`; the step's time has the optimizer's."""
    memory, words, losses = Memory(work.device), work.words(), list[torch.Tensor]()
    with piped(work, 4, schedule=one_f_one_b, **options) as pipe:
        optimizer = make(pipe)

        def step() -> None:
            with autocast or nullcontext():
                losses.append(pipe.train_step(words, words))
            optimizer.step()

        row = medians(pipe, step, work.device, work.num_steps) | memory.peak()
    return row | {
        "first_loss": losses[0].item(),
        "last_loss": losses[-1].item(),
        "num_steps": NUM_WARM_UPS + work.num_steps,
    }
