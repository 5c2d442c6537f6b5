"""Measure what each layer costs, on the device it is on, without leaving a trace in the model."""

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.costs.kinds import kind_of
from penstock.costs.layer_bytes import LayerBytes
from penstock.costs.untouched import untouched_gradients
from penstock.model.layers import Layers
from penstock.model.pytree import flatten, tree_map
from penstock.model.stage_plan import Step
from penstock.model.state import ABSENT, attributes, keeping_values, put_state, read_state
from penstock.torch_private import NEVER_COMPUTES, saving_hooks, storage_id

REPEATS = 3
ENOUGH_S, LONG_S = 0.5, 10.0
"""Seconds of measuring after which the model is not run again.  What a process does once, at its
first convolution say, is in the first run: that one alone will do only where layers take long."""
BACKWARD_PER_FORWARD = 2
"""Matrix products of a backward for one of the forward: the guess where none can be measured."""


class LayerTime(NamedTuple):
    """Seconds of a layer, for one micro-batch."""

    forward_s: float
    backward_s: float


NO_TIME = LayerTime(0.0, 0.0)


Look = Callable[[Step, list[Tensor]], None]
"""Is shown each layer, and what it gave, with its graph."""


def measure_layers(
    layers: Layers, inputs: Any, num_threads: int, look: Look | None = None
) -> tuple[LayerTime, ...]:
    """Time forward and backward of each layer on `inputs` (one micro-batch); let `look` see them.

    The model runs a few times, fewer if it takes long, and the fastest time of a layer counts; of
    layers that are alike one is timed, and the others run forward only.  Gradients, what is beside
    them on parameters, buffers and random number generators are as before afterwards; forward
    hooks of the user run as often as the layers do, hooks of parameters do not run.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with _untouched([step.module for step in layers]):
            return _measure_all(layers, inputs, look)
    finally:
        torch.set_num_threads(threads)


def _measure_all(layers: Layers, inputs: Any, look: Look | None) -> tuple[LayerTime, ...]:
    start_s = _now_s()
    found: list[tuple[LayerTime, ...]] = []
    while len(found) < REPEATS:
        taken_s = _now_s() - start_s
        if found and taken_s > (LONG_S if len(found) == 1 else ENOUGH_S):
            break
        meter = _Meter(look if not found else None)
        _run_once(layers, inputs, meter)
        found.append(tuple(meter.time_of(step) for step in layers))
    return tuple(min(times, key=sum) for times in zip(*found, strict=True))


Left = Callable[[nn.Module, list[Tensor]], int]
"""Counts what half a backward leaves of a layer, from the graph of what it gave."""


def measure_bytes(layers: Layers, inputs: Any, left: Left) -> tuple[LayerBytes, ...]:
    """Count what each layer keeps of `inputs` (one micro-batch) for its backward, by storage.

    The model runs once, forward; all is as before afterwards, as in `measure_layers`.
    """
    meter = _ByteMeter(left)
    with _untouched([step.module for step in layers]):
        _run_once(layers, inputs, meter)
    return tuple(meter.found.get(step.index, LayerBytes(0, 0, 0, 0, 0)) for step in layers)


class _ByteMeter:
    """Counts what the layers of one run of the model save."""

    def __init__(self, left: Left) -> None:
        self._left = left
        self.found: dict[int, LayerBytes] = {}

    def run(self, step: Step, run: Callable[[], Any], arguments: Any) -> Any:
        """Run a layer, and return what it gives."""
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            saved[storage_id(tensor)] = tensor.untyped_storage().nbytes()
            return tensor.detach()

        with saved_tensors_hooks(pack, _as_it_is):
            result = run()
        lasting = (*step.module.parameters(), *step.module.buffers())
        for tensor in lasting:
            saved.pop(storage_id(tensor), None)
        inputs, results = _storages(arguments), _storages(result)
        self.found[step.index] = LayerBytes(
            inner=sum(saved[s] for s in saved.keys() - inputs.keys() - results.keys()),
            inputs=sum(inputs.values()),
            saved_inputs=sum(saved[s] for s in saved.keys() & inputs.keys()),
            results=sum(results.values()),
            saved_results=sum(saved[s] for s in saved.keys() & results.keys() - inputs.keys()),
            left=self._left(step.module, flatten(result)[0]),
        )
        return result


def _storages(value: Any) -> dict[int, int]:
    """Return the bytes of the storages of a value's tensors, by what tells these apart."""
    return {storage_id(t): t.untyped_storage().nbytes() for t in flatten(value)[0]}


class _Meter:
    """Times the layers of one run of the model, the first one of each kind."""

    def __init__(self, look: Look | None) -> None:
        self._look = look
        self._times: dict[Hashable, LayerTime] = {}
        self._kinds: dict[int, Hashable] = {}

    def time_of(self, step: Step) -> LayerTime:
        """Return what a layer took, or one like it; nothing if it did not run."""
        kind = self._kinds.get(step.index)
        return NO_TIME if kind is None else self._times[kind]

    def run(self, step: Step, run: Callable[[], Any], arguments: Any) -> Any:
        """Run a layer, and return what it gives."""
        kind = self._kinds[step.index] = kind_of(step, arguments)
        try:
            if kind in self._times:
                result = run()
            else:
                result, self._times[kind] = _timed(step, run, arguments)
            if self._look is not None:
                self._look(step, flatten(result)[0])
            return result
        except Exception as error:
            error.add_note(
                f"raised in layer {step.label}, micro-batch 0, while its cost was measured to "
                "balance the stages"
            )
            raise


def _run_once(layers: Layers, inputs: Any, meter: "_Meter | _ByteMeter") -> None:
    """Run each layer on copies of its arguments; what it returns has no graph either."""

    def timed(step: Step, run: Any) -> Any:
        if step.index >= len(layers):  # a random operation between the layers of a model
            return run()
        device = _device_of(step.module) if layers.model is None else None
        copied = partial(_copied, device=device)
        arguments = tree_map(copied, (run.args, run.keywords))
        again = partial(run.func, *arguments[0], **arguments[1])
        return tree_map(copied, meter.run(step, again, arguments))

    layers.run(tree_map(Tensor.detach, inputs), timed)


def _timed(step: Step, run: Callable[[], Any], arguments: Any) -> tuple[Any, LayerTime]:
    """Run a layer forward and backward; return what it gave, and what that took."""
    start_s = _now_s()
    given = run()
    forward_s = _now_s() - start_s
    return given, LayerTime(forward_s, _backward_s(step.module, arguments, given, forward_s))


def _backward_s(module: nn.Module, arguments: Any, given: Any, forward_s: float) -> float:
    outputs = [t for t in flatten(given)[0] if t.requires_grad]
    wanted = [t for t in (*flatten(arguments)[0], *module.parameters()) if t.requires_grad]
    if not outputs or not wanted:
        return 0.0
    seeds = [torch.ones_like(t) for t in outputs]
    try:
        # a graph that layers share, by what one of them remembers, is needed again
        with untouched_gradients(module.parameters()):
            start_s = _now_s()
            torch.autograd.grad(outputs, wanted, seeds, allow_unused=True, retain_graph=True)
            return _now_s() - start_s
    except RuntimeError as error:
        if not any(word in str(error) for word in ("use_reentrant", "donated buffers")):
            raise  # a reentrant checkpoint, and a compiled layer, cannot be asked like this
        return forward_s * BACKWARD_PER_FORWARD


def _device_of(module: nn.Module) -> torch.device | None:
    """Return the device a layer is on; None if it has nothing that would say so."""
    tensors = chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in tensors), None)


def _copied(tensor: Tensor, device: torch.device | None) -> Tensor:
    """Copy a tensor between layers, which a layer may change in place.

    It wants a gradient where the model's own does, but no longer leads to what it came from.
    """
    copy = tensor.detach().to(device, copy=True)
    wants_grad = tensor.requires_grad and tensor.layout is torch.strided
    return copy.requires_grad_().clone() if wants_grad else copy


def _now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _saving_as_usual() -> AbstractContextManager[Any]:
    """Set hooks aside that would change what autograd saves: the caller may be in a checkpoint."""
    if saving_hooks() is None:
        return nullcontext()
    return saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


setattr(_as_it_is, NEVER_COMPUTES, True)


@contextmanager
def _untouched(modules: list[nn.Module]) -> Iterator[None]:
    """Put buffers, tensor attributes and random number generators back to what they were."""
    owners = list(dict.fromkeys(owner for module in modules for owner in module.modules()))
    before = read_state(owners, attributes(owners))
    devices = list(range(torch.cuda.device_count()))
    with keeping_values(tensor for tensor in before.values() if tensor is not None):
        try:
            with torch.random.fork_rng(devices=devices), torch.enable_grad(), _saving_as_usual():
                yield
        finally:
            after = read_state(owners, attributes(owners))
            put_state({place: before.get(place, ABSENT) for place in after.keys() | before.keys()})
