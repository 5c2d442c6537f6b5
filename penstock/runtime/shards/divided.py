"""Run layers in shards, with weights of which each process keeps a slice."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.costs.counting.opaque_calls import as_functions, opaque_of
from penstock.errors import ConfigError
from penstock.model.entries import layout_on, mark_layout
from penstock.model.materialize import has_memory
from penstock.model.pytree import flatten, tree_map, unflatten
from penstock.model.stage_plan import Step
from penstock.sharding.layouts import I, Layout, R, S
from penstock.sharding.plan import LayerSharding, Sharding
from penstock.torch_private import parameters_of

from .at_rest import Cut, Gathered, keep_slices
from .convert import Regather, convert
from .run import LayerRun, OtherPathError, ShardedTensor, Site
from .sizes import size_like

if TYPE_CHECKING:
    from penstock.mesh import Mesh
    from penstock.mesh.collectives import Collectives

Axes = Sequence["Collectives"]
Noted = dict[int, tuple[Layout | None, ...]]
"""Layouts of inputs, by layer."""


class DividedLayer:
    """Runs a layer in shards along axes; the plan has the layouts of its weights."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        plan: LayerSharding,
        axes: Axes,
        *,
        keeps: bool = False,
    ) -> None:
        self._index, self._module, self.plan, self.axes = index, module, plan, axes
        self._sites = [Site(call) for call in plan.calls]
        self._is_whole_in_evaluation = False
        self._opaque = [part for part in module.modules() if opaque_of(part) is not None]
        # 1. Fix the layouts of the weights, with sizes.
        whole = (I,) * len(axes)
        layouts = {
            id(p): size_like(plan.weights.get(name, whole), tuple(p.shape), whole, axes)
            for name, p in module.named_parameters()
        }
        self._places = [
            (parameters_of(part), name, layouts[id(parameter)])
            for part in module.modules()
            for name, parameter in parameters_of(part).items()
            if parameter is not None and parameter.requires_grad
        ]

        # 2. Sort the weights: sliced ones, cached conversions, gathered again, partial gradients.
        held = {parameters[name]: layout for parameters, name, layout in self._places}
        self.cut = {
            weight: Cut(tuple(I if x is R else x for x in layout), axes, tuple(weight.shape))
            for weight, layout in held.items()
            if any(isinstance(state, S) for state in layout)
        }
        """The sliced weights, with their layouts between steps, after the sum of gradients."""
        self.kept: dict[Tensor, dict[Layout, Tensor]] | None = (
            {weight: {} for weight in self.cut} if keeps else None
        )
        """Conversions of weights that last for a step, if the layer `keeps` them."""
        self._stand_ins: dict[Tensor, ShardedTensor] = {}
        """The stand-in for each weight: made once, without conversions between calls."""
        self._again = {
            parameter
            for name, parameter in module.named_parameters()
            if name in plan.again and not keeps
        }
        self.partial = [
            [weight for weight, layout in held.items() if layout[n] is R] for n in range(len(axes))
        ]
        """The weights, by axis, whose gradients are parts of a sum until the step ends.

        Their order is the same on each device, since they are summed in buckets.
        """

    def call(self, function: "partial[Any]", noted: Noted) -> Any:
        """Call the layer; its inputs and results are whole, or laid out as in the plan.

        `noted` has the layouts of inputs, by layer, for a recompute on the same micro-batch.  The
        plan holds for training, where another path raises OtherPathError.  A layer that takes
        another path in evaluation, and changes no inputs, runs whole there, on each device.
        """
        # A recompute gets tensors without marks, so the layouts come from the first run.
        leaves, structure = flatten((function.args, function.keywords))
        layouts = noted.setdefault(self._index, tuple(map(layout_on, leaves)))
        evaluates = not (self._module.training or torch.is_grad_enabled())
        if not (evaluates and self._is_whole_in_evaluation):
            try:
                return self._divided(function.func, leaves, layouts, structure)
            except OtherPathError:  # all devices raise it alike
                if not evaluates or any(call.changes for call in self.plan.calls):
                    raise
                self._is_whole_in_evaluation = True
        args, kwargs = unflatten(structure, _wholes(leaves, layouts, self.axes))
        whole = (I,) * len(self.axes)
        with self._instead(lambda w, layout: nn.Parameter(convert(w, layout, whole, self.axes))):
            return function.func(*args, **kwargs)

    def _divided(
        self,
        function: Callable[..., Any],
        leaves: Sequence[Tensor],
        layouts: Sequence[Layout | None],
        structure: Any,
    ) -> Any:
        """Run the layer's own Python on stand-ins, which record and check its calls."""
        # 1. Put stand-ins in the place of inputs and weights, and run the layer's forward.
        run = LayerRun(self.plan, self.axes, self._sites)
        wrapped = [run.wrapped(leaf, layout) for leaf, layout in zip(leaves, layouts, strict=True)]
        args, kwargs = unflatten(structure, wrapped)
        again = Regather() if self._again else None
        saving = nullcontext() if again is None else again.hooks()
        with self._lent(run, again), as_functions(self._opaque), saving:
            result = function(*args, **kwargs)
        # 2. Unwrap the results; their gradients make the backward gather the weights again.
        run.check_ended()
        result = tree_map(run.left, result)
        if again is not None:
            again.before_backward(flatten(result)[0])
        return result

    @contextmanager
    def _instead(self, replace: Callable[[Tensor, Layout], Tensor]) -> Iterator[None]:
        """Replace each weight in the modules by `replace(weight, layout)` inside."""
        weights = [parameters[name] for parameters, name, _ in self._places]
        try:
            for (parameters, name, layout), weight in zip(self._places, weights, strict=True):
                parameters[name] = replace(weight, layout)
            yield
        finally:
            for (parameters, name, _), weight in zip(self._places, weights, strict=True):
                parameters[name] = weight

    @contextmanager
    def _lent(self, run: "LayerRun", again: Regather | None) -> Iterator[None]:
        """Put the stand-ins of the weights into the modules inside."""
        held = [(parameters[name], layout) for parameters, name, layout in self._places]
        num_known = len(self._stand_ins)

        def lent(weight: Tensor, layout: Layout) -> Tensor:
            stand_in = self._stand_ins.get(weight)
            if stand_in is None:
                stand_in = self._stand_ins[weight] = run.wrapped(weight, layout)
                stand_in.kept = (self.kept or {}).get(weight)
            stand_in.run, stand_in.again = run, again if weight in self._again else None
            return stand_in

        try:
            with self._instead(lent):
                yield
        finally:
            for weight, layout in held:
                if weight in self._stand_ins:
                    self._stand_ins[weight].become(weight, layout)
            if len(self._stand_ins) > num_known:  # drop stand-ins of weights that were replaced
                self._stand_ins = {w: self._stand_ins[w] for w, _ in held if w in self._stand_ins}


def called_whole(multiple: int, function: "partial[Any]", noted: dict[int, Any]) -> Any:
    """Run the last layer of a stage on one device; the next stage gets slices of its samples.

    The result counts as one slice, if it can be cut evenly.
    """
    result = function()
    leaves, _ = flatten(result)
    if len(leaves) == 1 and leaves[0].dim() and not len(leaves[0]) % multiple:
        mark_layout(leaves[0], (S(0, (len(leaves[0]),)),))
    return result


def called_alike(index: int | None, axes: Axes, function: "partial[Any]", noted: Noted) -> Any:
    """Run a layer on all devices alike; gather inputs in slices first, on all devices at once.

    Without an `index` it is an operation between layers.
    """
    leaves, structure = flatten((function.args, function.keywords))
    layouts = tuple(map(layout_on, leaves))
    if index is not None:
        layouts = noted.setdefault(index, layouts)
    if not any(layouts):
        return function()
    args, kwargs = unflatten(structure, _wholes(leaves, layouts, axes))
    return function.func(*args, **kwargs)


def _wholes(
    tensors: Sequence[Tensor], layouts: Sequence[Layout | None], axes: Axes
) -> list[Tensor]:
    pairs, whole = zip(tensors, layouts, strict=True), (I,) * len(axes)
    return [t if layout is None else convert(t, layout, whole, axes) for t, layout in pairs]


Called = Callable[["partial[Any]", Noted], Any]
"""A call in the place of a layer's own, with the layouts of inputs noted so far."""
NO_LAYER = -1
"""The number in place of a layer's for operations between layers."""


class Shards:
    """The sharded layers of the stages here, by number, and their sliced weights.

    Axes of shards divide layers; weights may also be sliced along the replicas.
    """

    def __init__(self, sharding: Sharding | None, mesh: "Mesh") -> None:
        self.sharding, self._axes, self._sum_axes = sharding, mesh.shard_axes, mesh.sum_axes
        self._everyone, self._replicas = mesh.shards.tensors, mesh.replicas.tensors
        self._keeps = sharding is not None and sharding.keeps
        self.layers: dict[int, DividedLayer] = {}
        self.calls: dict[int, Called] = {}
        """The calls that replace layers' own, by number."""
        self.cut: dict[Tensor, Cut] = {}
        """The weights of which this process keeps a slice, with their layouts."""
        self.for_step: Callable[[], AbstractContextManager[None]] = nullcontext
        """A context for a step: inside, weights are laid out as calls need them."""
        self._gathered: Gathered | None = None
        if sharding is not None and sharding.gathers:
            self._gathered = Gathered((*self._axes, self._replicas))
            self.for_step = self._gathered.for_step
        if self._keeps:
            self.for_step = partial(self._keeping, self.for_step)

    @property
    def partial(self) -> list[tuple["Collectives", list[Tensor]]]:
        """The weights whose gradients are summed along each axis, in one order on all devices."""
        of_axes = (
            [*dict.fromkeys(w for layer in self.layers.values() for w in layer.partial[n])]
            for n in range(len(self._sum_axes))
        )
        return [own for own in zip(self._sum_axes, of_axes, strict=True) if own[1]]

    @property
    def is_shared(self) -> bool:
        """True if other processes run the stages of this process too."""
        return self._everyone.size * self._replicas.size > 1

    @property
    def has_replicas(self) -> bool:
        """True if gradients are summed over replicas."""
        return self._replicas.size > 1

    @property
    def cut_in_step(self) -> set[Tensor]:
        """The weights that calls use in slices, and whose gradients are slices."""
        return {weight for layer in self.layers.values() for weight in layer.cut}

    def place(self, steps: Sequence[Step]) -> None:
        """Divide layers that share weights; keep this device's slices of the weights.

        The values are those of the first shard and the first replica.
        """
        # 1. Choose the call of each layer: divided, whole, or alike on all devices.
        assert self.sharding is not None
        cut: dict[Tensor, Cut] = {}
        if prod(axis.size for axis in self._axes) > 1:
            alike = {n: partial(called_alike, n, self._axes) for n in (s.index for s in steps)}
            self.calls |= {NO_LAYER: partial(called_alike, None, self._axes), **alike}
        for step in steps:
            plan = self.sharding.layers[step.index]
            if plan.is_divided:
                layer = DividedLayer(step.index, step.module, plan, self._axes, keeps=self._keeps)
                self.layers[step.index], self.calls[step.index] = layer, layer.call
                cut |= layer.cut
            elif plan.gives_slices:
                self.calls[step.index] = partial(called_whole, plan.multiple)

        # 2. Slice further weights between steps only (ZeRO's first stage).
        if self._gathered is not None:
            weights = dict.fromkeys(w for step in steps for w in step.module.parameters())
            trained = [w for w in weights if w.requires_grad and not w.is_meta]
            cut |= self._gathered.add(trained, cut)

        # 3. Copy whole values from the first device, then keep slices.
        purpose = "for the weights that others keep slices of"
        with_values = [weight for weight in cut if has_memory(weight)]
        has_values = torch.tensor([has_memory(weight) for weight in cut], dtype=torch.uint8)
        for group in (self._everyone, self._replicas) if cut else ():
            if any(not row.equal(has_values) for row in group.all_gather(has_values, purpose)):
                raise ConfigError(
                    f"layer {steps[0].path!r} has values in some of the processes that share it, "
                    "and is on the meta device in others; build it alike in all of them"
                )
            group.copy_from_first(with_values, purpose)
        keep_slices(cut)
        self.cut |= cut

    @contextmanager
    def _keeping(self, for_step: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Cache conversions of weights until the step ends."""
        try:
            with for_step():
                yield
        finally:
            for layer in self.layers.values():
                for conversions in (layer.kept or {}).values():
                    conversions.clear()

    def start_equal(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors that are not sliced from the first shard to all."""
        if self.sharding is not None:
            whole = [tensor for tensor in tensors if tensor not in self.cut]
            self._everyone.copy_from_first(whole, "for the first shard's parameters and buffers")
