"""Run a layer in shards: its own Python code, on tensors that hold a shard each.

    layer's input ──► ShardedTensor ──► layer's own forward ──► ShardedTensor ──► layer's output
                                             │
                          each function of torch: convert its arguments, run it on the
                          shards, note the layouts of its results

A `ShardedTensor` reports the shape of the whole, so code that reads shapes needs no change.
Autograd sees only the shards and the conversions between them.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import multi_head_attention_forward
from torch.overrides import resolve_name

from penstock.costs.counting.classify import tensors_in
from penstock.costs.counting.fused_kernels import LOOKED_INTO
from penstock.errors import PlanError
from penstock.model.capture.ghost import OF_A_PART, PLAIN, bare, is_question, map_tensors
from penstock.model.entries import mark_layout, whole_size
from penstock.model.pytree import flatten, unflatten
from penstock.sharding.layouts import I, Layout, S, Shape
from penstock.sharding.letters import base_name
from penstock.sharding.plan import LayerSharding, PlannedCall
from penstock.torch_private import without_torch_dispatch, without_torch_function

from .convert import Regather, convert
from .kernels import kernel_of, shapes_given
from .sizes import Local, Sized, size, size_like

if TYPE_CHECKING:
    from penstock.mesh.collectives import Collectives


class ShardedTensor(Tensor):
    """Represents a whole tensor of which this device holds `local`, in layout `held`.

    `known` caches its conversions by layout.  `made_by` is the number of the call that returned
    it, and its place in the result.
    """

    local: Tensor
    held: Layout
    whole_shape: Shape
    run: "LayerRun"
    known: dict[Layout, Tensor]
    made_by: tuple[int, int]
    __hash__: ClassVar[Any] = Tensor.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_question(func, args, kwargs):
            if func in OF_A_PART:  # the shard has the answer, the shape of the whole all others
                return func(args[0].local)
            with without_torch_function():
                return func(*args, **kwargs)
        if func is multi_head_attention_forward:  # the plan has the calls inside it
            return LOOKED_INTO(*args, **kwargs)
        tensors = _tensors_of(args, kwargs)
        runs = [t.run for t in tensors.values() if type(t) is ShardedTensor]
        run = next((own for own in runs if not own.is_over), runs[0])  # a loss may keep a sum
        with without_torch_function():
            if run.is_over:
                args, kwargs = _with_locals(args, kwargs, run.wholes(tensors))
                return func(*args, **kwargs)
            return run.call(func, args, kwargs, tensors)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as an instance's method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with without_torch_dispatch():
            return func(*args, **(kwargs or {}))

    kept: dict[Layout, Tensor] | None = None
    """Conversions of a weight that last for a step, by layout."""
    again: Regather | None = None
    """The record of conversions of a weight that autograd must not save."""

    def become(self, local: Tensor, layout: Layout) -> None:
        """Take another local part and layout, after an in-place change."""
        self.local, self.held, self.known = local, layout, {}

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes what is of no use here
        return f"ShardedTensor({self.held!r}, shape {self.whole_shape})"


_NAMES: dict[Any, str] = {}
"""Full names of functions of torch, which live as long as torch does."""


def _name_of(func: Any) -> str:
    """Return the full name of a function of torch, or `__name__` of another function."""
    name = _NAMES.get(func) or resolve_name(func)
    if not name:
        return getattr(func, "__name__", "")
    return _NAMES.setdefault(func, name)


def _tensors_of(args: Any, kwargs: Any) -> dict[int, Tensor]:
    """Return the tensors among arguments, by id; most calls have none in a list or a dict."""
    tensors = {}
    for part in (*args, *kwargs.values()) if kwargs else args:
        if type(part) in PLAIN:
            continue
        if not isinstance(part, Tensor):
            return {id(tensor): tensor for tensor in tensors_in((args, kwargs))}
        tensors[id(part)] = part
    return tensors


def _with_locals(args: Any, kwargs: Any, local_of: Mapping[int, Tensor]) -> tuple[Any, Any]:
    """Return the arguments with this device's parts, by id, in the place of tensors."""
    found = tuple([local_of.get(id(part), part) for part in args])
    named = {key: local_of.get(id(part), part) for key, part in kwargs.items()}
    every = (*found, *named.values()) if named else found
    if all(type(part) in PLAIN or isinstance(part, Tensor) for part in every):
        return found, named
    mapped: tuple[Any, Any] = map_tensors(lambda t: local_of[id(t)], (args, kwargs))
    return mapped


class _Known(NamedTuple):
    """What a call was given once, and what follows from it in every later run."""

    facts: list[tuple[Shape, Layout]]
    """The whole shape and the layout of each argument."""
    shapes: tuple[Shape, ...] | None
    """The shapes of whole results that were asked for, if any were."""
    sized: Sized
    wholes: dict[Any, tuple[Shape, Tensor]]
    """The shape and the bare tensor of whole results, by the facts of the part of this device."""


class Site:
    """A planned call of a layer, and what its last few kinds of arguments lead to."""

    def __init__(self, planned: PlannedCall) -> None:
        self.planned = planned
        self.name = base_name(planned.function)
        self.kernel = kernel_of(planned.function)
        self.known: list[_Known] = []


_MOST_KNOWN = 16
"""Most kinds of arguments, and of results, that are known of a call."""


class OtherPathError(PlanError):
    """A layer's forward does not make the calls of its plan."""


class LayerRun:
    """Runs one call of a divided layer, and counts its planned calls.

    The `sites` of these calls know layouts with sizes from earlier runs.
    """

    def __init__(
        self, plan: LayerSharding, axes: "Sequence[Collectives]", sites: Sequence[Site]
    ) -> None:
        self._plan, self._axes, self._next, self._sites = plan, axes, 0, sites
        self._whole = (I,) * len(axes)
        self.is_over = False
        """True once the layer has returned: its values are used whole from then on."""

    def wrapped(self, local: Tensor, layout: Layout | None = None) -> ShardedTensor:
        """Wrap this device's part of a tensor, in a layout with sizes; None for a whole tensor.

        An OtherPathError refuses a part whose shape does not fit the layout.
        """
        layout = self._whole if layout is None else layout
        return self._standing_for(self._whole_of(local, layout), local, layout)

    def _whole_of(self, local: Tensor, layout: Layout) -> tuple[Shape, Tensor]:
        """Return the shape and a bare tensor of the whole of which this is a part."""
        # 1. Check the slices, the last axis first: it cuts the slices of the axes before it.
        shape = list(local.shape)
        for axis, state in zip(reversed(self._axes), reversed(layout), strict=True):
            if isinstance(state, S):
                if shape[state.dim] != state.sizes[axis.rank]:
                    raise self._other_path(
                        f"has {tuple(local.shape)} of a tensor whose dimension {state.dim} is cut "
                        f"into {state.sizes}"
                    )
                shape[state.dim] = sum(state.sizes)
        # 2. Make a tensor of the whole size without memory, which answers questions about shapes.
        strides = local.stride() if local.layout is torch.strided else None
        whole, strides = whole_size(tuple(local.shape), strides, layout)
        return whole, bare(whole, strides, local.dtype)

    def _standing_for(
        self, whole: tuple[Shape, Tensor], local: Tensor, layout: Layout
    ) -> ShardedTensor:
        sharded = whole[1].as_subclass(ShardedTensor)
        sharded.run, sharded.whole_shape, sharded.made_by = self, whole[0], (-1, 0)
        sharded.local, sharded.held, sharded.known = local, layout, {}
        return sharded

    def left(self, tensor: Tensor) -> Tensor:
        """Unwrap a result of the layer: whole, or marked with the next layer's layout."""
        if not isinstance(tensor, ShardedTensor):
            return tensor
        layout, multiple = self._plan.leaving.get(tensor.made_by), self._plan.multiple
        if layout is None or tensor.whole_shape[0] % multiple:
            return self._held_as(tensor, self._whole)
        layout = size_like(layout, tensor.whole_shape, tensor.held, self._axes)
        local = self._held_as(tensor, layout)
        mark_layout(local, layout)
        return local

    def wholes(self, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return tensors by id, with the whole of each that a device has a shard of."""
        return {
            key: self._held_as(tensor, self._whole) if type(tensor) is ShardedTensor else tensor
            for key, tensor in tensors.items()
        }

    def check_ended(self) -> None:
        """Raise OtherPathError for a forward with fewer calls than its plan."""
        if self._next != len(self._plan.calls):
            raise self._other_path("ended")
        self.is_over = True

    def call(self, func: Any, args: Any, kwargs: Any, tensors: Mapping[int, Tensor]) -> Any:
        """Run a function of torch on shards, as planned; `tensors` are those of its arguments."""
        # 1. Find the planned call and its layouts for these shapes; convert the arguments.
        site = self._site(func)
        planned = site.planned
        if len(tensors) != len(planned.takes):
            raise self._other_number("tensors", tensors, planned.takes)
        arguments = [
            tensor if type(tensor) is ShardedTensor else self.wrapped(tensor)
            for tensor in tensors.values()
        ]
        known = self._known(site, arguments, (func, args, kwargs))
        sized = known.sized
        locals_ = [
            tensor.local if tensor.held is layout else self._held_as(tensor, layout)
            for tensor, layout in zip(arguments, sized.takes, strict=True)
        ]
        for place in planned.changes:  # an in-place change must not reach a cached conversion
            if locals_[place] is not arguments[place].local:
                locals_[place] = locals_[place].clone()

        # 2. Run the function, or its kernel, on the shards.
        local_of = dict(zip(tensors, locals_, strict=True))
        args, kwargs = _with_locals(args, kwargs, local_of)
        if site.kernel is None:
            result = func(*args, **kwargs)
        else:
            result = site.kernel(func, args, kwargs, Local(sized, self._axes))
        for place in planned.changes:
            arguments[place].become(result, sized.gives[0])

        # 3. Wrap the results with their layouts.
        if isinstance(result, Tensor) and len(sized.gives) == 1:
            return self._result(result, 0, known, arguments)
        leaves, structure = flatten(result)
        if len(leaves) != len(sized.gives):
            raise self._other_number("results", leaves, sized.gives)
        places = enumerate(leaves)
        return unflatten(structure, [self._result(x, n, known, arguments) for n, x in places])

    def _known(
        self, site: Site, arguments: Sequence[ShardedTensor], how: tuple[Any, Any, Any]
    ) -> _Known:
        """Return what follows from the arguments of a call, as it was known or found anew."""
        facts = [(tensor.whole_shape, tensor.held) for tensor in arguments]
        shapes = shapes_given(site.name, how, arguments)
        for known in site.known:  # identical tuples compare at once
            if known.facts == facts and known.shapes == shapes:
                return known
        whole, before = [shape for shape, _ in facts], [layout for _, layout in facts]
        sized = size(site.planned, whole, before, shapes, self._axes)
        site.known[:] = [_Known(facts, shapes, sized, {}), *site.known[: _MOST_KNOWN - 1]]
        return site.known[0]

    def _result(
        self, local: Tensor, place: int, known: _Known, arguments: Sequence[ShardedTensor]
    ) -> ShardedTensor:
        """Wrap a result; a function that returns its argument returns the same wrapper."""
        layout = known.sized.gives[place]
        for argument in arguments:
            if argument.local is local and argument.held == layout:
                argument.made_by = self._next - 1, place
                return argument
        key: Any = None
        if local.layout is torch.strided:
            key = place, local.shape, local.stride(), local.dtype
        whole = known.wholes.get(key)
        if whole is None:
            whole = self._whole_of(local, layout)
            if key is not None and len(known.wholes) < _MOST_KNOWN:
                known.wholes[key] = whole
        result = self._standing_for(whole, local, layout)
        result.made_by = self._next - 1, place
        return result

    def _held_as(self, tensor: ShardedTensor, layout: Layout) -> Tensor:
        """Return this device's part of a tensor in another layout."""
        if layout == tensor.held:
            return tensor.local
        known = tensor.known
        if layout not in known:
            how = tensor.local, tensor.held, layout, self._axes
            known[layout] = convert(*how, tensor.kept)
            if tensor.again is not None:
                tensor.again.note(known[layout], how)
        return known[layout]

    def _site(self, func: Any) -> Site:
        """Return the next planned call, which a function of torch has to make."""
        site = self._sites[self._next] if self._next < len(self._sites) else None
        name = _name_of(func)
        if site is None or site.name != base_name(name):
            raise self._other_path(f"calls {name}")
        self._next += 1
        return site

    def _other_number(
        self, noun: str, actual: Collection[Any], planned: Collection[Any]
    ) -> OtherPathError:
        """Return the error for the current call, whose number of tensors is not the plan's."""
        self._next -= 1
        does = f"calls {self._plan.calls[self._next].function} with {len(actual)} {noun}"
        return self._other_path(does, f"calls it with {len(planned)}")

    def _other_path(self, does: str, wanted: str = "") -> OtherPathError:
        done, calls = self._next, self._plan.calls
        wanted = wanted or (f"calls {calls[done].function}" if done < len(calls) else "ends")
        return OtherPathError(
            f"layer {self._plan.name!r} {does} as its call {done}, where its sharding {wanted}: "
            "its forward takes another path than on the example inputs. Give example inputs that "
            "take the path of training; or use stages and replicas, which divide no layer, in the "
            "place of shards"
        )
