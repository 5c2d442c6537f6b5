"""Measure the seconds and bytes of layers on their device, and leave the model unchanged.

The model runs a few times, as a step does:

    forward     layer 0 ──► layer 1 ──► ... ──► layer n
    backward    layer 0 ◄── layer 1 ◄── ... ◄── layer n

so that saved tensors have left the caches when the backward comes, as in a step.
"""

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.costs.counting.count import Left
from penstock.costs.records import AtSize, LayerKind, LayerSeconds
from penstock.errors import ConfigError
from penstock.model.kept import run_unnoticed
from penstock.model.layers import Layers

from .layer_run import CallLayer, call_alone, untouched
from .measure_bytes import measure_bytes
from .step_timer import Divide, Look, StepTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Numbers of runs of a model that is measured."""

    warming: int
    """First runs, which do not count: a process allocates memory, and compiles, in these."""
    counting: int
    """Most runs that count."""
    enough_s: float
    """Seconds of counted runs after which no other follows."""
    long_s: float
    """Seconds of a first run after which no other follows; it counts then."""


TO_BALANCE = Repeats(warming=2, counting=5, enough_s=0.5, long_s=10.0)
"""Few runs, since each new pipeline measures."""
THOROUGH = Repeats(warming=2, counting=50, enough_s=5.0, long_s=60.0)
"""Many runs, for each micro-batch size of a profile."""


def repeats_within(budget_s: float) -> Repeats:
    """Return few runs of a model, which take about `budget_s`; a single one if it is long."""
    return Repeats(warming=1, counting=5, enough_s=budget_s / 2, long_s=budget_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """Settings of the runs that measure layers."""

    threads: int = 1
    """Intra-op threads."""
    call: Callable[[Layers], CallLayer] = lambda layers: call_alone
    """Makes the function that calls layers as stages do."""
    divide: Divide | None = None
    """Divides backwards; with it, recomputes and backwards in two parts are measured too."""
    busy: int = 0
    """Cores that run copies of the layers during a second measurement."""
    repeats: Repeats = TO_BALANCE


class Objective(nn.Module):
    """A loss function with its targets: a layer that takes the model's output."""

    def __init__(self, loss: Callable[[Any, Any], Tensor], targets: Any) -> None:
        super().__init__()
        self.loss, self.targets = loss, targets

    def forward(self, output: Any) -> Tensor:
        return self.loss(output, self.targets)


class Measurement(NamedTuple):
    """Seconds of layers, and the bytes that they keep if `measure` counted them."""

    timer: StepTimer
    kept: AtSize | None

    def seconds(self, *numbers: int) -> LayerSeconds:
        """Return the seconds of a layer, or of several equal ones."""
        return self.timer.seconds(*numbers)


def measure(
    layers: Layers,
    inputs: Any,
    how: How,
    *,
    loss: nn.Module | None = None,
    look: Look | None = None,
    left: Left | None = None,
) -> Measurement:
    """Measure each layer on `inputs` (one micro-batch), and the `loss` as a layer after the last.

    The model runs a few times; medians count, also over equal layers.  Parameters with gradients
    and attributes, buffers, attributes and random number generators stay unchanged, and hooks do
    not run (see `unnoticed`).  `look` sees each layer once.  With `left`, another forward counts
    the bytes that layers keep.
    """

    # The runs of the whole model time each layer, and leave the model unchanged.
    def run() -> StepTimer:
        timer = StepTimer(layers, call=call, look=look, divide=how.divide, loss=loss)
        with untouched([step.module for step in layers]):
            _repeat(timer, inputs, how.repeats)
        return timer

    # Threads are set for the time of the measurement only.
    call, threads = how.call(layers), torch.get_num_threads()
    torch.set_num_threads(how.threads)
    try:
        timer = run_unnoticed(layers.modules, run)
    finally:
        torch.set_num_threads(threads)
    return Measurement(timer, None if left is None else measure_bytes(layers, inputs, left))


def _repeat(timer: StepTimer, inputs: Any, repeats: Repeats) -> None:
    """Run the model as often as `repeats` says."""
    taken_s = 0.0
    for number in range(repeats.warming + repeats.counting):
        start_s = time.perf_counter()
        timer.run(inputs)
        run_s = time.perf_counter() - start_s
        is_long = number == 0 and run_s > repeats.long_s
        is_warm = number >= repeats.warming
        timer.samples.end_run(counts=is_long or is_warm)
        taken_s += run_s if is_warm else 0.0
        if is_long or taken_s > repeats.enough_s:
            return


def with_seconds(
    counted: AtSize, layers: Layers, inputs: Any, how: How, loss: nn.Module | None = None
) -> AtSize:
    """Return counted costs with measured seconds of `inputs` (one micro-batch): medians over all
    layers of a kind.
    """
    # 1. Find the layers of each kind: their medians count together.
    members: list[list[int]] = [[] for _ in counted.kinds]
    for number, kind in enumerate(counted.kind_of):
        members[kind].append(number)

    def add(costs: AtSize, name: str) -> AtSize:
        measured = measure(layers, inputs, how, loss=loss)

        def timed(kind: LayerKind, numbers: list[int]) -> LayerKind:
            seconds: dict[str, Any] = {name: measured.seconds(*numbers)}
            return replace(kind, **seconds)

        return replace(
            costs,
            kinds=tuple(map(timed, costs.kinds, members)),
            loss=None if costs.loss is None else timed(costs.loss, [len(layers)]),
        )

    # 2. Measure alone, and again while copies of the layers keep other cores busy.
    costs = add(counted, "seconds")
    if not how.busy:
        return costs
    with torch.random.fork_rng(devices=[]), _working(layers, inputs, how, loss):
        return add(costs, "busy_seconds")


@contextmanager
def _working(layers: Layers, inputs: Any, how: How, loss: nn.Module | None) -> Iterator[None]:
    """Run copies of the layers in other threads meanwhile, one for each busy core."""
    # 1. Copy the layers: a module cannot run in two threads at once.
    try:
        twins = [copy.deepcopy(layers) for _ in range(how.busy)]
    except Exception as error:
        raise ConfigError(
            f"the layers cannot be copied, which busy=True needs ({error}); leave busy out"
        ) from error
    # 2. Run the copies until the block ends; threads do not inherit the caller's autocast.
    stop = threading.Event()
    lower = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")

    def work(twin: Layers) -> None:
        torch.set_num_threads(how.threads)
        timer = StepTimer(twin, call=how.call(twin), divide=how.divide, loss=loss)
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
