"""Time the layers of a model in one run after the other, in the order of a step.

Each layer has a separate graph, and its results get gradients of ones.  Gradients of weights are
added to others, as for all micro-batches after the first.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from statistics import median, quantiles
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from penstock.costs.counting.layer_calls import kind_of
from penstock.costs.records import PARTS, LayerSeconds
from penstock.model.entries import Entry
from penstock.model.layers import Layers
from penstock.model.pytree import flatten
from penstock.model.stage_plan import Step
from penstock.torch_private import node_number

from .layer_run import (
    CallLayer,
    LayerRun,
    call_alone,
    named,
    run_alone,
    untouched_gradients,
)

Mark = float | torch.cuda.Event
"""A point in time, on the host or on an accelerator."""


def mark(device: torch.device) -> Mark:
    """Return a mark of the moment when the device has finished all work so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Return the seconds between two marks of a device, once it has reached both."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1_000


_BOTH = "forward and backward"
"""Key of their sum."""


class Samples:
    """Seconds by kind of layer and part of a step, such as "forward_s"."""

    def __init__(self) -> None:
        self._now: list[tuple[int, Hashable, str, Mark, Mark]] = []
        self._found: defaultdict[tuple[Hashable, str], list[float]] = defaultdict(list)

    def add(self, layer: int, kind: Hashable, part: str, start: Mark, end: Mark) -> None:
        """Note the start and the end of a part of a layer's step."""
        self._now.append((layer, kind, part, start, end))

    def end_run(self, *, counts: bool) -> None:
        """End a run of the model; keep its seconds if it `counts`."""
        noted, self._now = self._now, []
        layers: defaultdict[tuple[int, Hashable], dict[str, float]] = defaultdict(dict)
        for layer, kind, part, start, end in noted if counts else ():
            layers[layer, kind][part] = seconds_between(start, end)
            self._found[kind, part].append(layers[layer, kind][part])
        for (_, kind), parts in layers.items():
            if "forward_s" in parts and "backward_s" in parts:
                self._found[kind, _BOTH].append(parts["forward_s"] + parts["backward_s"])

    def median(self, kinds: Collection[Hashable], part: str) -> float | None:
        """Return the median of a part over layers of these kinds; None if none was measured."""
        seconds = self._of(kinds, part)
        return median(seconds) if seconds else None

    def spread(self, kinds: Collection[Hashable]) -> float:
        """Return half the interquartile range of forward plus backward, over their median."""
        seconds = self._of(kinds, _BOTH)
        if len(seconds) < 2:
            return 0.0
        low, middle, high = quantiles(seconds, n=4, method="inclusive")
        return (high - low) / 2 / middle if middle else 0.0

    def _of(self, kinds: Collection[Hashable], part: str) -> list[float]:
        return [seconds for kind in kinds for seconds in self._found.get((kind, part), ())]


BACKWARD_PER_FORWARD = 2
"""Seconds of a backward over its forward's: the guess if it cannot be measured."""
_UNMEASURABLE = ("use_reentrant", "donated buffers", "second time")
"""Words of torch's errors about reentrant checkpoints, compiled layers and freed graphs."""
_CAST = "ToCopyBackward0"
"""Name of the autograd node of a cast."""


class Parts(Protocol):
    """A backward in two parts."""

    def run_input(self, roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Compute the gradients of inputs."""

    def run_weights(self) -> None:
        """Add the gradients of weights to `.grad`."""


Divide = Callable[[Sequence[Tensor], Sequence[Entry]], Parts | None]
"""Divides the backward of a graph, from roots to entries; None if it stays whole."""
Look = Callable[[Step, list[Tensor]], None]
"""Sees each layer and its results, with their graph."""


class _Ran(NamedTuple):
    """A layer between its forward and its backward."""

    step: Step
    kind: Hashable
    device: torch.device
    entries: list[Entry]
    roots: list[Tensor]

    @property
    def weights(self) -> list[Tensor]:
        return [p for p in self.step.module.parameters() if p.requires_grad]

    def seeds(self) -> list[Tensor]:
        return [torch.ones_like(root) for root in self.roots]


class StepTimer:
    """Runs the layers of a model and takes their times, as medians over equal layers.

    Each run times every forward, and the backward of another one of several equal layers.  With
    `divide`, it also times recomputes, and backwards in two parts.  `call` runs forwards.
    The `loss` is a layer after the last one.  `look` sees the layers of the first run.
    """

    def __init__(
        self,
        layers: Layers,
        *,
        call: CallLayer = call_alone,
        look: Look | None = None,
        divide: Divide | None = None,
        loss: nn.Module | None = None,
    ) -> None:
        self._layers, self._call, self._look = layers, call, look
        self._divide, self._loss = divide, loss
        self.samples = Samples()
        self._kinds: dict[int, Hashable] = {}
        self._alike: dict[Hashable, list[int]] = {}
        self._number = 0
        self._shares_graphs = False

    def seconds(self, *numbers: int) -> LayerSeconds:
        """Return the seconds of a layer, or of several equal ones; 0 if none ran."""
        kinds = {self._kinds[number] for number in numbers if number in self._kinds}
        medians = {part: self.samples.median(kinds, part) for part in PARTS}
        forward_s = medians["forward_s"] or 0.0
        backward_s = medians["backward_s"]
        if backward_s is None:
            backward_s = forward_s * BACKWARD_PER_FORWARD
        recompute_s, input_s = medians["recompute_s"], medians["input_s"]
        return LayerSeconds(
            forward_s=forward_s,
            recompute_s=forward_s if recompute_s is None else recompute_s,
            backward_s=backward_s,
            input_s=backward_s if input_s is None else input_s,
            weight_s=medians["weight_s"] or 0.0,
            spread=self.samples.spread(kinds),
        )

    def run(self, inputs: Any) -> None:
        """Run the model once, and take times."""
        ran = self._forward(inputs, "forward_s")
        while ran:
            with named(ran[-1].step):
                self._time_backward(ran.pop(), "backward_s")
        if self._divide is not None:
            self._forward(inputs, None)
            ran = self._forward(inputs, "recompute_s")
            divided = []
            while ran:
                layer = ran.pop()
                divided.append((layer, self._time_input(layer, self._divide)))
            for layer, parts in divided:
                self._time_weights(layer, parts)
        self._number += 1

    @property
    def _keeps_graphs(self) -> bool:
        """True if backwards have to keep the graph, which takes longer.

        A layer that remembers results needs it.  The second run's forward tells.
        """
        return self._shares_graphs or self._number == 0

    def _forward(self, inputs: Any, part: str | None) -> list[_Ran]:
        """Run all layers; return the ones to run backward, and none for a part without a name."""
        ran: list[_Ran] = []

        def perform(layer: LayerRun) -> Any:
            step, device, kind = layer.step, layer.device, self._kind(layer)
            with named(step):
                start = mark(device)
                result = self._call(step, layer.run)
                end = mark(device)
                tensors = flatten(result)[0]
                # The first runs tell whether layers share a graph with earlier ones.
                if self._number <= 1:
                    self._shares_graphs |= _has_older(tensors, layer.first_node)
                if self._look is not None:
                    self._look(step, tensors)
            if part is not None:
                self.samples.add(step.index, kind, part, start, end)
                # Of equal layers one runs backward in each run, in turn.
                alike = self._alike[kind]
                turn = alike[self._number % len(alike)]
                if turn == step.index:
                    roots = [tensor for tensor in tensors if tensor.requires_grad]
                    ran.append(_Ran(step, kind, device, layer.entries, roots))
            return result

        run_alone(self._layers, inputs, perform, self._loss)
        self._look = None
        return ran

    def _kind(self, layer: LayerRun) -> Hashable:
        index = layer.step.index
        if index not in self._kinds:
            kind = self._kinds[index] = kind_of(layer.step, layer.arguments)
            self._alike.setdefault(kind, []).append(index)
        return self._kinds[index]

    # -- backward -----------------------------------------------------------------------------

    def _add(self, layer: _Ran, part: str, start: Mark) -> None:
        """Note the end of a part of a layer's backward that began at `start`."""
        self.samples.add(layer.step.index, layer.kind, part, start, mark(layer.device))

    def _time_backward(self, layer: _Ran, part: str) -> None:
        """Time a backward in one part."""
        # 1. A layer without gradients takes no time.
        weights, seeds = layer.weights, layer.seeds()
        wanted = [*(entry.tensor for entry in layer.entries), *weights]
        if not layer.roots or not wanted:
            now = mark(layer.device)
            self.samples.add(layer.step.index, layer.kind, part, now, now)
            return
        # 2. Time the backward with the sum of gradients, as for micro-batches after the first.
        sums = [torch.zeros_like(weight) for weight in weights]
        keeps = self._keeps_graphs
        try:
            with untouched_gradients(layer.step.module):
                start = mark(layer.device)
                gradients = torch.autograd.grad(
                    layer.roots, wanted, seeds, allow_unused=True, retain_graph=keeps
                )
                _add_up(sums, gradients[len(layer.entries) :])
                self._add(layer, part, start)
        except RuntimeError as error:
            if not any(words in str(error) for words in _UNMEASURABLE):
                raise

    def _time_input(self, layer: _Ran, divide: Divide) -> Parts | None:
        """Time the first part of a backward, or all of it if it stays whole."""
        if not self._keeps_graphs and layer.roots:
            seeds = layer.seeds()
            with untouched_gradients(layer.step.module):
                start = mark(layer.device)
                parts = divide(layer.roots, layer.entries)
                if parts is not None:
                    parts.run_input(layer.roots, seeds)
                    self._add(layer, "input_s", start)
                    return parts
        self._time_backward(layer, "input_s")
        return None

    def _time_weights(self, layer: _Ran, parts: Parts | None) -> None:
        """Time the second part of a backward, if there is one."""
        if parts is None:
            now = mark(layer.device)
            self.samples.add(layer.step.index, layer.kind, "weight_s", now, now)
            return
        with untouched_gradients(layer.step.module):
            for weight in layer.weights:
                weight.grad = torch.zeros_like(weight)
            start = mark(layer.device)
            parts.run_weights()
            self._add(layer, "weight_s", start)


def _has_older(tensors: Sequence[Tensor], number: int) -> bool:
    """Tell if the graph of tensors has nodes that are older than node `number`.

    Casts do not count: autocast remembers them, and they save nothing.
    """
    waiting = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if (node_number(node) or number) < number and node.name() != _CAST:
            return True
        after = {edge for edge, _ in node.next_functions if edge is not None} - seen
        seen |= after
        waiting += after
    return False


@torch.no_grad()
def _add_up(sums: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for total, gradient in zip(sums, gradients, strict=True):
        if gradient is not None:
            total.add_(gradient)
