"""Count what the layers of a model do with one micro-batch, on meta tensors: no device is needed.

    forward, once          operators of each layer     what it saves     values between layers
    backward, twice        operators of the whole; those that run, too, where only gradients of
                           the layers' inputs are asked for are the input part, the rest is weight

The forward and the backward are torch's own; the model is as it was afterwards.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.costs.records import AtSize, LayerKind, Operator
from penstock.errors import BatchError, ConfigError, shown
from penstock.model.batch import batch_size
from penstock.model.kept import run_unnoticed, unnoticed
from penstock.model.layers import Layers
from penstock.model.pytree import flatten, tree_map
from penstock.model.stage_plan import Crossing, Step
from penstock.torch_private import storage_id

from .backward_graph import BackwardGraph
from .boundaries import divided_bytes, values_of
from .classify import dtype_name
from .graph import Graph
from .layer_calls import Classes, classes_of, kind_of
from .meta import inputs_on_meta, on_meta
from .opaque_calls import as_functions, reader_of
from .recorder import NeedsValues, Recorder

Left = Callable[[nn.Module, list[Tensor]], int]
"""Counts what half a backward leaves of a layer, from the graph of what it gave."""
Loss = Callable[[Any, Any], Tensor]


def count_layers(  # noqa: PLR0913 - the front door: each a keyword with a default
    layers: Layers,
    example_inputs: Any,
    *,
    microbatch_size: int | None = None,
    loss: Loss | None = None,
    targets: Any = None,
    left: Left | None = None,
    own: Iterable[Tensor] = (),
    torch_type: str = "cuda",
) -> AtSize:
    """Count the operators of each layer and of its backward, and what is saved and handed over.

    Args:
        layers: the model; it may be on the meta device.
        example_inputs: one micro-batch; only shapes and dtypes count.
        microbatch_size: samples in it; default: the size of the first dimension.
        loss: called with the model's output and `targets`, to be counted too.
        targets: one micro-batch of them.
        left: counts what the input part of a divided backward leaves; without it `left_bytes`
            are 0.
        own: parameters and buffers of which each micro-batch has its own, which count where they
            are saved: a pipeline gives BatchNorm such running statistics.
        torch_type: the type of device whose kernels of attention and dropout are counted: "cuda",
            "cpu", or another one that has none.

    Raises:
        ConfigError: a layer needs values, which meta tensors do not have; names it.
        BatchError: a layer, or the loss, does not take the shapes that reach it; names it.
    """
    size = samples_in(example_inputs) if microbatch_size is None else microbatch_size
    separate = {id(tensor) for tensor in own}

    def run() -> AtSize:
        count = _Count(layers, left, inputs_on_meta(targets))
        with count.counted(example_inputs, torch_type, loss) as lent:
            lasting = {storage_id(tensor) for n, tensor in lent.items() if n not in separate}
            found = count.found(lasting, size)
        count.free()
        return found

    return run_unnoticed(layers.modules, run)


def record_graph(
    layers: Layers,
    example_inputs: Any,
    *,
    loss: Loss | None = None,
    targets: Any = None,
    torch_type: str = "cuda",
) -> Graph:
    """Return the calls of torch's functions that the layers make, with all that each costs; see
    `count_layers`.  The loss is of a layer after the last.
    """
    count = _Count(layers, None, inputs_on_meta(targets))
    counted = count.counted(example_inputs, torch_type, loss)
    with unnoticed(layers.modules, hooks=True), counted as lent:  # as they run in shards
        found = count.graph({storage_id(tensor) for tensor in lent.values()})
    count.free()
    return found


def samples_in(inputs: Any) -> int:
    """Count the samples of an example; its first dimension tells where it is no batch."""
    with suppress(BatchError):
        return batch_size(inputs, "example inputs")
    return next((t.shape[0] for t in flatten(inputs)[0] if t.dim()), 1)


class _Count:
    """One run of a model, and what is seen of it.  The loss counts as a layer after the last."""

    def __init__(self, layers: Layers, left: Left | None, targets: Any) -> None:
        self._layers, self._left_of, self._targets = layers, left, targets
        self._recorder = Recorder({}, "")
        self._has_loss = False
        self._left: dict[int, int] = {}
        self._left_of_kind: dict[Hashable, int] = {}
        self._crossings: tuple[Crossing, ...] = ()
        self._roots: list[Tensor] = []
        self._graph: BackwardGraph | None = None
        self._operators: dict[int, list[Operator]] = {}

    @contextmanager
    def counted(
        self, inputs: Any, torch_type: str, loss: Loss | None
    ) -> Iterator[dict[int, Tensor]]:
        """Run the model forward and backward; yield what stands for its tensors, by their ids."""
        modules = self._layers.modules
        with (
            on_meta(modules) as lent,
            as_functions(modules),
            torch.enable_grad(),
            self.explained(inputs),
        ):
            self._recorder = Recorder(_names(self._layers), torch_type)
            self.run(inputs_on_meta(inputs), loss)
            weights = (tensor for tensor in lent.values() if isinstance(tensor, nn.Parameter))
            self.run_backward([weight for weight in weights if weight.requires_grad])
            yield lent

    def run(self, inputs: Any, loss: Loss | None) -> None:
        """Run the model forward."""
        recorder, layers = self._recorder, self._layers
        recorder.begin(0, is_between=True)
        with recorder.forward():
            output, self._crossings = layers.source.run_noting(inputs, self._perform)
            recorder.begin(len(layers))
            self._has_loss = loss is not None
            if loss is not None:
                output = loss(output, self._targets)
        recorder.end(flatten(output)[0])
        self._roots = [tensor for tensor in flatten(output)[0] if tensor.requires_grad]

    def run_backward(self, weights: list[Tensor]) -> None:
        """Run the model backward, twice; `weights` are those that want gradients."""
        crossing = (each.tensors for each in self._crossings if not each.is_weight)
        crossed = {id(tensor): tensor for tensors in crossing for tensor in tensors}
        boundaries = [tensor for tensor in crossed.values() if tensor.requires_grad]
        if self._roots:
            self._graph = BackwardGraph(self._roots, self._recorder.marks)
            self._operators = self._graph.run(self._recorder, boundaries, weights)

    def free(self) -> None:
        """Let go of all tensors, and of the graph behind them, however deep it is."""
        self._crossings, self._roots = (), []
        if self._graph is not None:
            self._graph.free()

    def _perform(self, step: Step, function: Any) -> Any:
        if step.index >= len(self._layers):  # a random operation between layers
            return function()
        self._recorder.begin(step.index)
        self._recorder.enter(flatten((function.args, function.keywords))[0])
        result = function()
        self._recorder.begin(step.index, is_between=True)
        if self._left_of is not None:
            self._note_left(step, function, self._left_of)
        return result

    def _note_left(self, step: Step, function: Any, left_of: Left) -> None:
        """Run a layer of each kind again, with a graph of its own."""
        kind = kind_of(step, (function.args, function.keywords))
        if kind not in self._left_of_kind:
            with self._recorder.paused():
                args, kwargs = tree_map(_alone, (function.args, function.keywords))
                results = flatten(function.func(*args, **kwargs))[0]
            self._left_of_kind[kind] = left_of(step.module, results)
        self._left[step.index] = self._left_of_kind[kind]

    def graph(self, lasting: set[int]) -> Graph:
        """Return the graph; `lasting` are storages of parameters and buffers."""
        custom = set() if self._graph is None else self._graph.custom
        return self._recorder.graph(self._operators, lasting, custom)

    def found(self, lasting: set[int], microbatch_size: int) -> AtSize:
        """Return what was seen; `lasting` are storages of parameters and buffers."""
        values, storages = values_of(self._crossings)
        targets = [tensor for tensor in flatten(self._targets)[0] if self._has_loss]
        lasting = lasting | {storage_id(tensor) for tensor in targets}
        numbers: dict[tuple[Classes, LayerKind], int] = {}
        graph, of_layers = self.graph(lasting), self._recorder.saved_of_layers()
        kind_numbers: list[int] = []
        saved: list[tuple[int, ...]] = []
        for n in range(len(self._layers) + 1):
            calls = graph.of_layer(n)
            counts = Counter(operator for call in calls for operator in call.operators)
            own = {s: size for s, size in of_layers.get(n, {}).items() if s not in lasting}
            is_loss = n == len(self._layers)
            at_boundary = [not v.consumers if is_loss else v.touches(n) for v in values]
            inner_bytes, places = divided_bytes(at_boundary, storages, own)
            kind = LayerKind(
                operators=tuple(replace(x, count=count) for x, count in counts.items()),
                inner_bytes=inner_bytes,
                left_bytes=self._left.get(n, 0),
                draws=any(call.draws for call in calls),
            )
            classes = () if is_loss else classes_of(self._layers.steps[n].module)
            kind_numbers.append(numbers.setdefault((classes, kind), len(numbers)))
            saved.append(places)
        *kinds_of_layers, of_loss = kind_numbers
        every = [kind for _, kind in numbers]
        return AtSize(
            microbatch_size=microbatch_size,
            kinds=tuple(every),
            kind_of=tuple(kinds_of_layers),
            values=values,
            saved=tuple(saved[:-1]),
            loss_saved=saved[-1],
            loss=every[of_loss] if self._has_loss else None,
            target_bytes=sum(tensor.numel() * tensor.element_size() for tensor in targets),
        )

    @contextmanager
    def explained(self, inputs: Any) -> Iterator[None]:
        """Turn the errors of tensors without values into one that says what to do.

        Raises:
            ConfigError: the layer needs values; names it.
            BatchError: the layer does not take the shapes that it is given; names it.
        """
        try:
            yield
        except (NeedsValues, NotImplementedError, RuntimeError) as error:
            if "use_reentrant" in str(error):
                raise ConfigError(
                    f"{self._where()} has a checkpoint with use_reentrant=True, whose backward "
                    "cannot be counted. Use checkpoint(..., use_reentrant=False), or let its cost "
                    "be measured on a device instead"
                ) from error
            if type(error) is RuntimeError and "meta" not in str(error):
                given = ", ".join(
                    f"{dtype_name(t.dtype)} of shape {tuple(t.shape)}"
                    if isinstance(t, Tensor)
                    else shown(t)
                    for t in flatten(inputs)[0]
                )
                raise BatchError(
                    f"{self._where()} does not take what reaches it ({_first_line(error)}). "
                    f"The example inputs are {given}; give a batch that the model and the loss "
                    "take"
                ) from error
            raise ConfigError(
                f"{self._where()} needs the values of its inputs, and costs are counted on "
                f"tensors without values ({_first_line(error)}). Let its cost be measured on a "
                f"device instead, or declare {reader_of(error)} opaque "
                "(penstock.costs.counting.opaque_modules.opaque_module)"
            ) from error

    def _where(self) -> str:
        layer, steps = self._recorder.layer, self._layers.steps
        return f"layer {steps[layer].label}" if layer < len(steps) else "the loss"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _names(layers: Layers) -> dict[int, str]:
    """Return the model's names of parameters and buffers, by the id of the tensor."""
    found: dict[int, str] = {}
    for step in layers:
        for name, tensor in (*step.module.named_parameters(), *step.module.named_buffers()):
            found.setdefault(id(tensor), f"{step.path}.{name}")
    return found


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor that wants a gradient where this one does, and comes from nowhere."""
    copy = torch.empty_like(tensor.detach(), device="meta")
    return copy.requires_grad_().clone() if tensor.requires_grad else copy
