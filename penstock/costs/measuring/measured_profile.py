"""Measure the layers of a model for a profile: thoroughly, and in all parts of a step."""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.costs.records import AtSize, LayerKind, LayerSeconds
from penstock.errors import ConfigError
from penstock.model.layers import Layers

from .measure import Repeats, timed
from .step_timer import CallLayer, Divide, StepTimer

THOROUGH = Repeats(warming=2, counting=50, enough_s=5.0, long_s=60.0)
"""At each micro-batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How layers are measured: with so many intra-op threads, called and with
    backwards divided as stages do; with `busy`, a second time while all other cores do the same.
    """

    threads: int
    call: Callable[[Layers], CallLayer]
    divide: Divide
    busy: int = 0
    repeats: Repeats = THOROUGH


class Objective(nn.Module):
    """A loss function with its targets: a layer that takes the model's output."""

    def __init__(self, loss: Callable[[Any, Any], Tensor], targets: Any) -> None:
        super().__init__()
        self.loss, self.targets = loss, targets

    def forward(self, output: Any) -> Tensor:
        return self.loss(output, self.targets)


def measured(
    layers: Layers, inputs: Any, counted: AtSize, how: How, objective: Objective | None = None
) -> AtSize:
    """Add to what was counted what is measured, on `inputs` of one micro-batch.

    Layers whose kind is one have the medians of all of them.

    Raises:
        ConfigError: the layers cannot be copied, to keep other cores busy.
    """
    alone = _timed(layers, inputs, how, objective)
    found = _with(counted, alone, _alone, len(layers))
    if not how.busy:
        return found
    with torch.random.fork_rng(devices=[]), _working(layers, inputs, how, objective):
        busy = _timed(layers, inputs, how, objective)
    return _with(found, busy, _busy, len(layers))


def _timed(layers: Layers, inputs: Any, how: How, objective: Objective | None) -> StepTimer:
    make = partial(StepTimer, layers, call=how.call(layers), divide=how.divide, loss=objective)
    return timed(layers, inputs, how.threads, make, how.repeats)


def _alone(kind: LayerKind, seconds: LayerSeconds) -> LayerKind:
    return replace(kind, seconds=seconds)


def _busy(kind: LayerKind, seconds: LayerSeconds) -> LayerKind:
    return replace(kind, busy_seconds=seconds)


def _with(
    counted: AtSize,
    timer: StepTimer,
    put: Callable[[LayerKind, LayerSeconds], LayerKind],
    num_layers: int,
) -> AtSize:
    """Put what was measured into each kind."""

    def of(kind: LayerKind, numbers: Sequence[int]) -> LayerKind:
        return put(kind, timer.seconds(*numbers))

    members: list[list[int]] = [[] for _ in counted.kinds]
    for number, kind in enumerate(counted.kind_of):
        members[kind].append(number)
    return replace(
        counted,
        kinds=tuple(map(of, counted.kinds, members)),
        loss=None if counted.loss is None else of(counted.loss, [num_layers]),
    )


@contextmanager
def _working(layers: Layers, inputs: Any, how: How, objective: Objective | None) -> Iterator[None]:
    """Let other threads run copies of the layers meanwhile, one for each busy core."""
    try:
        twins = [copy.deepcopy(layers) for _ in range(how.busy)]
    except Exception as error:
        raise ConfigError(
            f"the layers cannot be copied, which busy=True needs ({error}); leave busy out"
        ) from error
    stop = threading.Event()
    lower = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")

    def work(twin: Layers) -> None:
        torch.set_num_threads(how.threads)
        timer = StepTimer(twin, call=how.call(twin), divide=how.divide, loss=objective)
        with torch.autocast("cpu", lower[0], enabled=lower[1]):
            while not stop.is_set():
                timer.run(inputs)
                timer.samples.end_run(counts=False)

    threads = [threading.Thread(target=work, args=(twin,), daemon=True) for twin in twins]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
