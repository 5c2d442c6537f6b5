"""Layers that are run in shards: their weights at rest, and what a checkpoint sees of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.costs.opaque_modules import as_functions, opaque_of
from penstock.errors import PlanError
from penstock.model.pytree import flatten, tree_map, unflatten
from penstock.model.stage_plan import Step
from penstock.torch_private import parameters_of
from penstock.trace.units import count_text

from .convert import convert
from .layouts import I, Layout, R, S
from .plan import LayerSharding, Sharding
from .run import Known, LayerRun, layout_on
from .sizes import size_like

if TYPE_CHECKING:
    from penstock.mesh.collectives import Collectives

Axes = Sequence["Collectives"]


def _at_rest(layout: Layout) -> Layout:
    """Return a weight's layout once its gradient is summed."""
    return tuple(I if state is R else state for state in layout)


class Cut(NamedTuple):
    """A weight that is cut: its layout at rest, along which axes, and its whole shape."""

    layout: Layout
    axes: Axes
    shape: tuple[int, ...]

    @property
    def whole(self) -> Layout:
        """The layout in which each device has all of it."""
        return (I,) * len(self.axes)


class DividedLayer:
    """A layer that is run in shards along axes; its weights are at rest as the plan says."""

    def __init__(self, index: int, module: nn.Module, plan: LayerSharding, axes: Axes) -> None:
        self._index, self._module, self.plan, self.axes = index, module, plan, axes
        self._known: Known = {}
        self._opaque = [part for part in module.modules() if opaque_of(part) is not None]
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
        held = {parameters[name]: layout for parameters, name, layout in self._places}
        self.cut = {
            weight: Cut(_at_rest(layout), axes, tuple(weight.shape))
            for weight, layout in held.items()
            if any(isinstance(state, S) for state in layout)
        }
        """The weights that are cut."""
        self.partial = [
            [weight for weight, layout in held.items() if layout[n] is R] for n in range(len(axes))
        ]
        """The weights whose gradients are parts of a sum along each axis, until a step ends; in an
        order that is the same on each device, since they are summed in buckets.
        """

    def cut_weights(self) -> None:
        """Keep this device's shard of each weight only; each parameter stays the same object."""
        with torch.no_grad():
            for weight, cut in self.cut.items():
                weight.data = convert(weight.data, cut.whole, cut.layout, self.axes).clone()

    def call(self, function: "partial[Any]", noted: dict[int, tuple[Layout | None, ...]]) -> Any:
        """Call the layer; what it is given and what it gives is whole, or as the plan says.

        `noted` are layouts of what layers were given, by layer, for when they are called again on
        the same micro-batch.

        Raises:
            PlanError: it is given other tensors than those of the plan, or takes another path.
        """
        run = LayerRun(self.plan, self.axes, self._known)
        leaves, structure = flatten((function.args, function.keywords))
        layouts = noted.setdefault(self._index, tuple(map(layout_on, leaves)))
        given = sum(layout is not None for layout in layouts)
        if given != self.plan.num_entering:
            raise PlanError(
                f"layer {self.plan.name!r} is given {count_text(given, 'tensor')} in slices, and "
                f"its sharding expects {self.plan.num_entering}: something between the layers has "
                "changed since they were recorded"
            )
        wrapped = [run.entered(leaf, layout) for leaf, layout in zip(leaves, layouts, strict=True)]
        args, kwargs = unflatten(structure, wrapped)
        with self._lent(run), as_functions(self._opaque):
            result = function.func(*args, **kwargs)
        run.check_ended()
        return tree_map(run.left, result)

    @contextmanager
    def _lent(self, run: "LayerRun") -> Iterator[None]:
        """Let the modules have what stands for their weights meanwhile."""
        own = [(parameters, name, parameters[name]) for parameters, name, _ in self._places]
        try:
            for (parameters, name, layout), (*_, parameter) in zip(self._places, own, strict=True):
                parameters[name] = run.wrapped(parameter, layout)
            yield
        finally:
            for parameters, name, parameter in own:
                parameters[name] = parameter


class Shards:
    """The layers of this process that are divided, by number, along the axes of its stages' mesh;
    `everyone` are all processes that share these stages.
    """

    def __init__(
        self,
        sharding: Sharding | None,
        steps: Iterable[Step],
        axes: Axes,
        everyone: "Collectives",
    ) -> None:
        self.sharding, self.axes, self._everyone = sharding, axes, everyone
        own = [] if sharding is None else [(s, sharding.layers[s.index]) for s in steps]
        self.layers = {
            s.index: DividedLayer(s.index, s.module, plan, axes)
            for s, plan in own
            if plan.is_divided
        }

    def cut_weights(self, tensors: Iterable[Tensor]) -> None:
        """Let all shards have the values of the first one; keep the own shard of what is cut."""
        if self.sharding is None:
            return
        self._everyone.copy_from_first(tensors, "for the first shard's parameters and buffers")
        for layer in self.layers.values():
            layer.cut_weights()

    def partial(self) -> list[tuple["Collectives", list[Tensor]]]:
        """Return for each axis the weights whose gradients are to be summed along it, in an order
        that is the same on each device.
        """
        layers = self.layers.values()
        found = [
            (axis, [w for own in layers for w in own.partial[n]])
            for n, axis in enumerate(self.axes)
        ]
        return [(axis, weights) for axis, weights in found if weights]

    def named(self, weights: Mapping[str, Tensor]) -> "CutWeights":
        """Return what this process holds of weights, by their names."""
        return CutWeights(weights, self.layers.values())


class CutWeights:
    """What this process holds of weights that are cut, by the name of each."""

    def __init__(self, named: Mapping[str, Tensor], layers: Iterable[DividedLayer]) -> None:
        own = {weight: cut for layer in layers for weight, cut in layer.cut.items()}
        self._weights = own.keys()
        self._cut = {
            name: (own[weight], tuple(weight.shape))
            for name, weight in named.items()
            if weight in own
        }

    def are_cut(self, weights: Iterable[Tensor]) -> list[bool]:
        """Tell for each weight whether this process has a shard of it only."""
        return [weight in self._weights for weight in weights]

    def whole(
        self, tensors: Mapping[str, Tensor], *, of_optimizer: bool = False
    ) -> dict[str, Tensor]:
        """Put tensors together that are as large as the own shard of their weight.

        All processes that share the weights call this alike.  Keys are names of weights; those of
        an optimizer's state end in a dot and what it is.
        """
        return {key: self._put_together(key, x, of_optimizer) for key, x in tensors.items()}

    def own(self, tensors: Mapping[str, Any], *, of_optimizer: bool = False) -> dict[str, Any]:
        """Keep the own shard of tensors that are as large as their whole weight."""
        return {key: self._take(key, x, of_optimizer) for key, x in tensors.items()}

    def _put_together(self, key: str, tensor: Tensor, of_optimizer: bool) -> Tensor:
        found = self._cut.get(key.rpartition(".")[0] if of_optimizer else key)
        if found is None or tuple(tensor.shape) != found[1]:
            return tensor
        cut, _ = found
        with torch.no_grad():
            return convert(tensor, cut.layout, cut.whole, cut.axes)

    def _take(self, key: str, value: Any, of_optimizer: bool) -> Any:
        found = self._cut.get(key.rpartition(".")[0] if of_optimizer else key)
        if found is None or not isinstance(value, Tensor):
            return value
        cut, _ = found
        is_whole = tuple(value.shape) == cut.shape
        return convert(value, cut.whole, cut.layout, cut.axes) if is_whole else value
