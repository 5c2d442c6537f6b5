"""Count operators and bytes of a model's layers for one micro-batch, on meta tensors.

    forward, once     operators of each layer, bytes that it saves, values between layers
    backward, twice   all operators; the ones that also run for gradients of the layers' inputs
                      alone are the input part, all others the weight part

Both are torch's own.  No device is needed, and the model stays unchanged.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.costs.records import AtSize, LayerKind, Operator, Value
from penstock.errors import BatchError, ConfigError, shown
from penstock.model.batch import batch_size
from penstock.model.capture.watch import original_class
from penstock.model.kept import run_unnoticed, unnoticed
from penstock.model.layers import Layers
from penstock.model.pytree import flatten, tree_map
from penstock.model.stage_plan import Crossing, Step
from penstock.torch_private import storage_id

from .backward_graph import BackwardGraph
from .classify import dtype_name
from .fused_chains import fused
from .graph import Graph
from .layer_calls import facts_of_inputs, kind_of
from .meta import inputs_on_meta, on_meta
from .opaque_calls import as_functions, reader_of
from .recorder import NeedsValues, Recorder
from .repeats import Repeat, whole_graph, whole_size
from .shortened import counted_short

Left = Callable[[nn.Module, list[Tensor]], int]
"""Counts the bytes that the input part of a layer's backward leaves, from its results."""
Loss = Callable[[Any, Any], Tensor]
"""A loss function of the model's output and its targets."""


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
    compile: bool = False,
) -> AtSize:
    """Count the operators of each layer, the bytes it saves, and the values between layers.

    Args:
        layers: the model; it may be on the meta device.
        example_inputs: one micro-batch, of which only shapes and dtypes matter.
        microbatch_size: samples in it; default: the size of the first dimension.
        loss: a function of the model's output and `targets`, which is counted too.
        targets: one micro-batch of them.
        left: counts the bytes that the input part of a divided backward leaves; default: 0.
        own: parameters and buffers that each micro-batch has for itself, such as running
            statistics of BatchNorm; they count where they are saved.
        torch_type: the type of device whose kernels of attention and dropout are counted: "cuda",
            "cpu", or another one that has none.
        compile: count the kernels of compiled layers, as `fused` does.

    Raises:
        ConfigError: a layer reads values, which meta tensors do not have; names it.
        BatchError: a layer, or the loss, fails on the shapes of its inputs; names it.
    """
    # A tensor of `own` is not lasting: each micro-batch saves it again.
    size = samples_in(example_inputs) if microbatch_size is None else microbatch_size
    separate = {id(tensor) for tensor in own}

    def sized(some: Layers, repeats: Sequence[Repeat]) -> AtSize | None:
        count = _Count(some, left, inputs_on_meta(targets), compile)
        with count.counted(example_inputs, torch_type, loss) as lent:
            lasting = {storage_id(tensor) for n, tensor in lent.items() if n not in separate}
            if repeats and count.whole(lasting, repeats) is None:
                return None
            return whole_size(count.at_size(lasting, size), repeats)

    return run_unnoticed(
        layers.modules, lambda: counted_short(layers, sized, separate, compile=compile)
    )


def record_graph(
    layers: Layers,
    example_inputs: Any,
    *,
    loss: Loss | None = None,
    targets: Any = None,
    torch_type: str = "cuda",
    compile: bool = False,
) -> Graph:
    """Return the graph of the layers' calls with their costs, the loss a layer after the last.

    With `compile` the calls have the kernels of compiled layers.
    """

    def recorded(some: Layers, repeats: Sequence[Repeat]) -> Graph | None:
        count = _Count(some, None, inputs_on_meta(targets), compile)
        with count.counted(example_inputs, torch_type, loss) as lent:
            return count.whole({storage_id(tensor) for tensor in lent.values()}, repeats)

    with unnoticed(layers.modules, hooks=True):  # as they run in shards
        return counted_short(layers, recorded, compile=compile)


def samples_in(inputs: Any) -> int:
    """Return the samples of an example; the first tensor's length where it is no batch."""
    with suppress(BatchError):
        return batch_size(inputs, "example inputs")
    return next((t.shape[0] for t in flatten(inputs)[0] if t.dim()), 1)


class _Count:
    """One recorded run of a model.  The loss is a layer after the last one."""

    def __init__(self, layers: Layers, left: Left | None, targets: Any, compile: bool) -> None:
        self._layers, self._left_of, self._targets = layers, left, targets
        self._compile = compile
        self._recorder = Recorder({}, "")
        self._has_loss = False
        self._left: dict[int, int] = {}
        self._left_of_kind: dict[Hashable, int] = {}
        self._crossings: tuple[Crossing, ...] = ()
        self._roots: list[Tensor] = []
        self._graph: BackwardGraph | None = None
        self._operators: dict[int, list[Operator]] = {}
        self._entering: list[Hashable] = []

    @contextmanager
    def counted(
        self, inputs: Any, torch_type: str, loss: Loss | None
    ) -> Iterator[dict[int, Tensor]]:
        """Run the model forward and backward; yield the stand-ins of tensors by their ids."""
        modules = self._layers.modules
        with (
            on_meta(modules) as lent,
            as_functions(modules),
            torch.enable_grad(),
            self._explained(inputs),
        ):
            self._recorder = Recorder(_names(self._layers), torch_type)
            self._run(inputs_on_meta(inputs), loss)
            weights = (tensor for tensor in lent.values() if isinstance(tensor, nn.Parameter))
            self._run_backward([weight for weight in weights if weight.requires_grad])
            yield lent
        # Free all tensors, and then the graph behind them, which may be deep.
        self._crossings, self._roots = (), []
        if self._graph is not None:
            self._graph.free()

    def _run(self, inputs: Any, loss: Loss | None) -> None:
        recorder, layers = self._recorder, self._layers
        recorder.begin(0, is_between=True)
        with recorder.forward():
            output, self._crossings = layers.run_noting(inputs, self._perform)
            recorder.begin(len(layers))
            self._has_loss = loss is not None
            if loss is not None:
                output = loss(output, self._targets)
        recorder.end(flatten(output)[0])
        self._roots = [tensor for tensor in flatten(output)[0] if tensor.requires_grad]

    def _run_backward(self, weights: list[Tensor]) -> None:
        """Run the model backward, twice; `weights` are the trained ones."""
        values = (crossing.tensors for crossing in self._crossings if not crossing.is_weight)
        crossed = {id(tensor): tensor for tensors in values for tensor in tensors}
        boundaries = [tensor for tensor in crossed.values() if tensor.requires_grad]
        if self._roots:
            self._graph = BackwardGraph(self._roots, self._recorder.marks)
            self._operators = self._graph.run(self._recorder, boundaries, weights)

    def _perform(self, step: Step, function: Any) -> Any:
        if step.index >= len(self._layers):  # a random operation between layers
            return function()
        self._recorder.begin(step.index)
        self._recorder.enter(flatten((function.args, function.keywords))[0])
        self._entering.append(facts_of_inputs(step, function))
        result = function()
        self._recorder.begin(step.index, is_between=True)
        if self._left_of is not None:
            # Run a layer of each kind again: the graph of these bytes must be the layer's alone.
            kind = kind_of(step, (function.args, function.keywords))
            if kind not in self._left_of_kind:
                with self._recorder.paused():
                    args, kwargs = tree_map(_alone, (function.args, function.keywords))
                    results = flatten(function.func(*args, **kwargs))[0]
                    self._left_of_kind[kind] = self._left_of(step.module, results)
            self._left[step.index] = self._left_of_kind[kind]
        return result

    def graph(self, lasting: set[int]) -> Graph:
        """Return the graph; `lasting` are storages of parameters and buffers."""
        custom = set() if self._graph is None else self._graph.custom
        graph = self._recorder.graph(self._operators, lasting, custom)
        return fused(graph) if self._compile else graph

    def whole(self, lasting: set[int], repeats: Sequence[Repeat]) -> Graph | None:
        """Return the graph of all layers; None if the layers around what was left out are not
        given the same inputs and gradients, or do not run the same calls.
        """
        graph = self.graph(lasting)
        if not repeats:
            return graph
        given: dict[int, Counter[Hashable]] = {}
        for (call, facts), count in (self._graph.given if self._graph else {}).items():
            given.setdefault(self._recorder.layer_of(call), Counter())[facts] += count
        for layer, _ in repeats:
            facts = self._entering[layer]
            if facts is None or any(self._entering[layer + n] != facts for n in (-1, 1)):
                return None
            if given.get(layer) != given.get(layer - 1):
                return None
        paths = [step.path for step in self._layers]
        return whole_graph(graph, self._recorder.starts, repeats, paths)

    def at_size(self, lasting: set[int], microbatch_size: int) -> AtSize:
        """Return the costs; `lasting` are storages of parameters and buffers."""
        values, storages = values_of(self._crossings)
        # targets are kept in any case, like weights
        targets = [tensor for tensor in flatten(self._targets)[0] if self._has_loss]
        lasting = lasting | {storage_id(tensor) for tensor in targets}
        numbers: dict[tuple[tuple[type, ...], LayerKind], int] = {}
        graph, of_layers = self.graph(lasting), self._recorder.saved_of_layers()
        kind_numbers: list[int] = []
        saved: list[tuple[int, ...]] = []
        for n in range(len(self._layers) + 1):
            # 1. operators: equal ones once, with their number
            calls = graph.of_layer(n)
            counts = Counter(operator for call in calls for operator in call.operators)
            # 2. saved bytes: in values at the layer's borders, or inside
            in_layer = {s: size for s, size in of_layers.get(n, {}).items() if s not in lasting}
            is_loss = n == len(self._layers)
            at_boundary = [not v.consumers if is_loss else v.touches(n) for v in values]
            inner_bytes, places = divided_bytes(at_boundary, storages, in_layer)
            # 3. layers of equal classes and costs are of one kind
            kind = LayerKind(
                operators=tuple(replace(x, count=count) for x, count in counts.items()),
                inner_bytes=inner_bytes,
                left_bytes=self._left.get(n, 0),
                draws=any(call.draws for call in calls),
            )
            modules = () if is_loss else self._layers.steps[n].module.modules()
            classes = tuple(map(original_class, modules))  # their Python takes unrecorded time
            kind_numbers.append(numbers.setdefault((classes, kind), len(numbers)))
            saved.append(places)
        *kinds_of_layers, of_loss = kind_numbers
        kinds = [kind for _, kind in numbers]
        return AtSize(
            microbatch_size=microbatch_size,
            kinds=tuple(kinds),
            kind_of=tuple(kinds_of_layers),
            values=values,
            saved=tuple(saved[:-1]),
            loss_saved=saved[-1],
            loss=kinds[of_loss] if self._has_loss else None,
            target_bytes=sum(tensor.numel() * tensor.element_size() for tensor in targets),
        )

    @contextmanager
    def _explained(self, inputs: Any) -> Iterator[None]:
        """Turn errors of tensors without values into one with a remedy."""
        try:
            yield
        except (NeedsValues, NotImplementedError, RuntimeError) as error:
            # 1. The backward of such a checkpoint runs a second engine, which no hook sees.
            if "use_reentrant" in str(error):
                raise ConfigError(
                    f"{self._where()} has a checkpoint with use_reentrant=True, whose backward "
                    "cannot be counted. Use checkpoint(..., use_reentrant=False), or let its cost "
                    "be measured on a device instead"
                ) from error
            # 2. Any error that does not speak of the meta device is about shapes.
            if type(error) is RuntimeError and "meta" not in str(error):
                leaves = ", ".join(
                    f"{dtype_name(t.dtype)} of shape {tuple(t.shape)}"
                    if isinstance(t, Tensor)
                    else shown(t)
                    for t in flatten(inputs)[0]
                )
                raise BatchError(
                    f"{self._where()} does not take what reaches it ({_first_line(error)}). "
                    f"The example inputs are {leaves}; give a batch that the model and the loss "
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
    """Return the names of parameters and buffers in the model, by the tensor's id."""
    names: dict[int, str] = {}
    for step in layers:
        for name, tensor in (*step.module.named_parameters(), *step.module.named_buffers()):
            names.setdefault(id(tensor), f"{step.path}.{name}")
    return names


def _alone(tensor: Tensor) -> Tensor:
    """Return a meta tensor without a graph, which wants a gradient if this one does."""
    copy = torch.empty_like(tensor.detach(), device="meta")
    return copy.requires_grad_().clone() if tensor.requires_grad else copy


# -- bytes at the borders of layers ---------------------------------------------------------------


def values_of(
    crossings: Sequence[Crossing], same: Mapping[int, int] = MappingProxyType({})
) -> tuple[tuple[Value, ...], list[int]]:
    """Return the tensors between layers as values, and storages; `same` are copies' originals."""
    numbers: dict[int, int] = {}
    values, storages = [], []
    for crossing in crossings:
        for tensor in crossing.tensors:
            storage = storage_id(tensor)
            storage = same.get(storage, storage)
            storages.append(storage)
            values.append(
                Value(
                    crossing.producer,
                    crossing.consumers,
                    tensor.numel() * tensor.element_size(),
                    numbers.setdefault(storage, len(numbers)),
                    has_gradient=tensor.requires_grad,
                    is_weight=crossing.is_weight,
                )
            )
    return tuple(values), storages


def divided_bytes(
    at_boundary: Sequence[bool], storages: Sequence[int], saved: Mapping[int, int]
) -> tuple[int, tuple[int, ...]]:
    """Divide the bytes that a layer has `saved`, by storage: return those outside values at its
    boundary, and the places of the values there that it saves.
    """
    touched = [place for place, touches in enumerate(at_boundary) if touches]
    inner = saved.keys() - {storages[place] for place in touched}
    return sum(saved[s] for s in inner), tuple(p for p in touched if storages[p] in saved)
