"""Measure what each layer costs, on the device it is on, without leaving a trace in the model.

The model runs a few times, as a step does:

    forward     layer 0 ──► layer 1 ──► ... ──► layer n
    backward    layer 0 ◄── layer 1 ◄── ... ◄── layer n

so that what a layer has saved has left the caches when its backward comes, as in a step.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from penstock.costs.records import LayerSeconds
from penstock.model.kept import run_unnoticed
from penstock.model.layers import Layers

from .layer_run import untouched
from .step_timer import CallLayer, Look, StepTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """How often a model runs to be measured.

    The first `warming` runs do not count: in these a process does what it does once, and memory
    grows; how a layer draws random numbers is looked at in the second.  At most `counting` follow,
    and none after `enough_s`.  A first run of `long_s` is the only one, and counts.
    """

    warming: int
    counting: int
    enough_s: float
    long_s: float


TO_BALANCE = Repeats(warming=2, counting=5, enough_s=0.5, long_s=10.0)
"""Quick, for it is done whenever a pipeline is made."""


def measure_layers(
    layers: Layers,
    inputs: Any,
    num_threads: int,
    *,
    call: CallLayer | None = None,
    look: Look | None = None,
) -> tuple[LayerSeconds, ...]:
    """Time forward and backward of each layer on `inputs` (one micro-batch).

    The model runs a few times, fewer if it takes long; medians count, over layers that are alike
    as well: in each run another one of them runs backward, and the rest forward only.  Gradients,
    what is beside them on parameters, buffers, attributes and random number generators are as
    before afterwards, and hooks do not run (see `unnoticed`).  Forwards run by `call`; `look` sees
    each layer once.
    """
    make = partial(StepTimer, layers, call=call, look=look)
    timer = timed(layers, inputs, num_threads, make, TO_BALANCE)
    return tuple(timer.seconds(step.index) for step in layers)


def timed(
    layers: Layers,
    inputs: Any,
    num_threads: int,
    make: Callable[[], StepTimer],
    repeats: Repeats,
) -> StepTimer:
    """Return the timer that `make` makes, once the layers have run with so many intra-op threads;
    they are left as they were.
    """

    def run() -> StepTimer:
        timer = make()
        with untouched([step.module for step in layers]):
            repeat(timer, inputs, repeats)
        return timer

    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return run_unnoticed(layers.modules, run)
    finally:
        torch.set_num_threads(threads)


def repeat(timer: StepTimer, inputs: Any, repeats: Repeats) -> None:
    """Run the model again and again, until that is enough."""
    is_long = _run(timer, inputs) > repeats.long_s
    timer.samples.end_run(counts=is_long)
    if is_long:
        return
    for _ in range(repeats.warming - 1):
        _run(timer, inputs)
        timer.samples.end_run(counts=False)
    taken_s = 0.0
    for _ in range(repeats.counting):
        taken_s += _run(timer, inputs)
        timer.samples.end_run(counts=True)
        if taken_s > repeats.enough_s:
            break


def _run(timer: StepTimer, inputs: Any) -> float:
    """Run the model once; return the seconds that takes."""
    start_s = time.perf_counter()
    timer.run(inputs)
    return time.perf_counter() - start_s
