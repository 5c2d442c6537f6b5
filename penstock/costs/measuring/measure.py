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
from torch.autograd.graph import saved_tensors_hooks

from penstock.costs.counting.count import Left, divided_bytes, values_of
from penstock.costs.counting.layer_calls import as_it_is
from penstock.costs.records import AtSize, LayerKind, LayerSeconds
from penstock.errors import ConfigError
from penstock.model.copies import no_leaf
from penstock.model.layers import Layers
from penstock.model.materialize import tensors_of
from penstock.model.pytree import flatten, tree_map
from penstock.model.stage_plan import Step
from penstock.torch_private import storage_id

from .layer_run import (
    CallLayer,
    call_alone,
    device_of,
    named,
    run_untouched,
    wants_gradient,
)
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
        _repeat(timer, inputs, how.repeats)
        return timer

    # Threads are set for the time of the measurement only.
    call, threads = how.call(layers), torch.get_num_threads()
    torch.set_num_threads(how.threads)
    try:
        timer = run_untouched(layers, run)
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


def measure_bytes(layers: Layers, inputs: Any, left: Left) -> AtSize:
    """Return the bytes that each layer keeps of `inputs` (one micro-batch), each storage once.

    The model runs one forward, each layer with a separate graph; it stays unchanged, as
    in `measure`.  A loss counts as if it saved the model's output.
    """
    detached = tree_map(Tensor.detach, inputs)
    return run_untouched(layers, lambda: _Kept(layers, left).at_size(detached))


class _Kept:
    """Bytes that layers save while they run, by layer and by storage."""

    def __init__(self, layers: Layers, left: Left) -> None:
        self._layers, self._left_of = layers, left
        self._saved: dict[int, dict[int, int]] = {}
        self._left: dict[int, int] = {}
        self._same: dict[int, int] = {}
        """Storages of arguments, by the storages of results that share their memory."""

    def at_size(self, inputs: Any) -> AtSize:
        """Run the model, and return the bytes of each layer."""
        _, crossings = self._layers.run_noting(inputs, self._perform)
        values, storages = values_of(crossings, self._same)
        numbers = range(len(self._layers))
        of_layers = [
            divided_bytes([v.touches(n) for v in values], storages, self._saved.get(n, {}))
            for n in numbers
        ]
        outputs = {v.storage: v.num_bytes for v in values if not v.consumers}
        return AtSize(
            microbatch_size=1,
            kinds=tuple(
                LayerKind(operators=(), inner_bytes=inner, left_bytes=self._left.get(n, 0))
                for n, (inner, _) in enumerate(of_layers)
            ),
            kind_of=tuple(numbers),
            values=values,
            saved=tuple(places for _, places in of_layers),
            loss=LayerKind(operators=(), inner_bytes=sum(outputs.values()), left_bytes=0),
        )

    def _perform(self, step: Step, function: Any) -> Any:
        """Run a layer on copies of its arguments; return results without a graph.

        argument ──copy──► storage 2 ──► layer ──► result     a saved storage of a copy counts
        storage 1           lent[2] = 1     └─ saves 2        as the argument's: 1
        """
        if step.index >= len(self._layers):  # a random operation between layers
            return function()
        device = device_of(step.module) if self._layers.model is None else None
        lent: dict[int, int] = {}  # storages of arguments, by storages of their copies
        saved: dict[int, int] = {}  # bytes by storage

        def enter(tensor: Tensor) -> Tensor:
            copy = tensor.detach().to(device, copy=True)
            if wants_gradient(tensor):
                copy = no_leaf(copy.requires_grad_())  # which may be changed in place
            storage = storage_id(tensor)
            lent[storage_id(copy)] = self._same.get(storage, storage)
            return copy

        def pack(tensor: Tensor) -> Tensor:
            saved[storage_id(tensor)] = tensor.untyped_storage().nbytes()
            return tensor.detach()

        # 1. Run the layer on copies of its arguments, so that its graph is separate.
        args, keywords = tree_map(enter, (function.args, function.keywords))
        with named(step), saved_tensors_hooks(pack, as_it_is):
            result = function.func(*args, **keywords)
        # 2. Count what it saves beside its weights, by storages of the original arguments.
        for tensor in tensors_of(step.module):
            saved.pop(storage_id(tensor), None)
        self._saved[step.index] = {lent.get(s, s): size for s, size in saved.items()}
        # 3. Note results that share memory with arguments: a later layer may save them.
        results = flatten(result)[0]
        self._left[step.index] = self._left_of(step.module, results)
        own_storages = {storage_id(tensor) for tensor in results}
        self._same.update({s: lent[s] for s in own_storages & lent.keys()})
        return tree_map(_leave, result)


def _leave(tensor: Tensor) -> Tensor:
    return no_leaf(tensor.detach().requires_grad_(tensor.requires_grad))
