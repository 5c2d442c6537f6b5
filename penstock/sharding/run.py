"""Run a layer as its plan divides it: the layer's own Python, on tensors that hold a shard each.

    layer's input ──► ShardedTensor ──► layer's own forward ──► ShardedTensor ──► layer's output
                                             │
                          each function of torch: convert what it is given, run it on
                          the shards, note the layouts of what it gives

A `ShardedTensor` reports the shape of the whole, so that code that looks at shapes is unchanged.
Autograd sees the shards and the conversions between them, and nothing else.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import resolve_name

from penstock.costs.classify import tensors_in
from penstock.errors import PlanError
from penstock.model.capture.ghost import is_question
from penstock.model.pytree import tree_map
from penstock.torch_private import without_torch_dispatch, without_torch_function

from .convert import convert
from .kernels import Local, kernel_of, shapes_given
from .layouts import I, Layout, S
from .plan import LayerSharding, PlannedCall
from .rules import base_name
from .sizes import Sized, size, size_like

if TYPE_CHECKING:
    from penstock.mesh.collectives import Collectives

Shape = tuple[int, ...]


class ShardedTensor(Tensor):
    """Stands for a whole tensor of which this device holds `local`: `held` is its layout.

    `known` are conversions of it that were made already, by layout; `made_by` says which call of
    its layer gave it, and at which place.
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
            return _answer(func, args, kwargs)
        run = next(each.run for each in _sharded((args, kwargs)))
        with without_torch_function():
            return run.call(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as an instance's method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with without_torch_dispatch():
            return func(*args, **(kwargs or {}))

    def become(self, local: Tensor, layout: Layout) -> None:
        """Stand for what it was changed to in place: this part of it, in this layout."""
        self.local, self.held, self.known = local, layout, {layout: local}

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes what is of no use here
        return f"ShardedTensor({self.held!r}, shape {self.whole_shape})"


_OF_THE_SHARD = tuple(getattr(Tensor, name).__get__ for name in ("requires_grad", "device"))
"""Questions whose answer is that of the shard."""


def _answer(func: Any, args: Any, kwargs: Any) -> Any:
    """Answer a question about the whole by its shape, or by the shard where it is the same."""
    if func in _OF_THE_SHARD:
        return func(args[0].local)
    with without_torch_function():
        return func(*args, **kwargs)


@lru_cache(maxsize=4096)
def _bare(shape: Shape, dtype: torch.dtype) -> Tensor:
    with without_torch_function():
        return torch.empty(shape, dtype=dtype, device="meta")


def _sharded(value: Any) -> Iterator[ShardedTensor]:
    return (tensor for tensor in tensors_in(value) if isinstance(tensor, ShardedTensor))


_HELD = "penstock_layout"


def layout_on(value: Any) -> Layout | None:
    """Return the layout that stands on what an earlier layer gave; None: it is whole."""
    found: Layout | None = getattr(value, _HELD, None)
    return found


class LayerRun:
    """One call of a divided layer: which of its planned calls comes next.

    `sized` are layouts with sizes that earlier calls have found, by all that they depend on.
    """

    def __init__(
        self, plan: LayerSharding, axes: "Sequence[Collectives]", sized: dict[Any, Sized]
    ) -> None:
        self._plan, self._axes, self._next, self._sized = plan, axes, 0, sized
        self._whole = (I,) * len(axes)

    def wrapped(self, local: Tensor, layout: Layout) -> ShardedTensor:
        """Wrap what this device holds of a tensor, in a layout with sizes.

        Raises:
            PlanError: it is no such part.
        """
        shape = list(local.shape)
        for axis, state in reversed(list(zip(self._axes, layout, strict=True))):
            if isinstance(state, S):
                if shape[state.dim] != state.sizes[axis.rank]:
                    raise self._other_path(
                        f"has {tuple(local.shape)} of a tensor whose dimension {state.dim} is cut "
                        f"into {state.sizes}"
                    )
                shape[state.dim] = sum(state.sizes)
        whole = tuple(shape)
        with without_torch_function():
            found = _bare(whole, local.dtype).as_subclass(ShardedTensor)
        found.run, found.whole_shape, found.made_by = self, whole, (-1, 0)
        found.become(local, layout)
        return found

    def entered(self, tensor: Tensor, layout: Layout | None) -> ShardedTensor:
        """Wrap what the layer is given: whole, or in a layout with sizes."""
        return self.wrapped(tensor, self._whole if layout is None else layout)

    def left(self, tensor: Tensor) -> Tensor:
        """Unwrap what the layer gives: whole, or in the layout that the next one expects, which
        then stands on it.
        """
        if not isinstance(tensor, ShardedTensor):
            return tensor
        layout = self._plan.leaving.get(tensor.made_by)
        if layout is None:
            return self._held_as(tensor, self._whole)
        layout = size_like(layout, tensor.whole_shape, tensor.held, self._axes)
        local = self._held_as(tensor, layout)
        setattr(local, _HELD, layout)
        return local

    def check_ended(self) -> None:
        """Refuse a forward that made fewer calls than its plan.

        Raises:
            PlanError: it took another path.
        """
        if self._next != len(self._plan.calls):
            raise self._other_path("ended")

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function of torch on shards, as planned."""
        planned = self._planned(func)
        args, kwargs = tree_map(self._lifted, (args, kwargs))
        given = list(dict.fromkeys(_sharded((args, kwargs))))
        if len(given) != len(planned.takes):
            raise self._other_path(f"gives {len(given)} tensors to {planned.function}")
        sized = self._sizes(planned, given, (func, args, kwargs))
        locals_ = {id(t): self._held_as(t, to) for t, to in zip(given, sized.takes, strict=True)}
        for changed in (given[place] for place in planned.changes):
            if locals_[id(changed)] is not changed.local:
                locals_[id(changed)] = locals_[id(changed)].clone()
        local_args, local_kwargs = tree_map(lambda t: locals_[id(t)], (args, kwargs))
        kernel = kernel_of(planned.function)
        if kernel is None:
            result = func(*local_args, **local_kwargs)
        else:
            result = kernel(func, local_args, local_kwargs, Local(sized, self._axes))
        for changed in (given[place] for place in planned.changes):
            changed.become(result, sized.gives[0])
        gives = iter(enumerate(sized.gives))
        same = {id(tensor.local): tensor for tensor in given}
        return tree_map(lambda local: self._given(local, *next(gives), same), result)

    def _sizes(
        self, planned: PlannedCall, given: Sequence[ShardedTensor], how: tuple[Any, Any, Any]
    ) -> Sized:
        facts = tuple((tensor.whole_shape, tensor.held) for tensor in given)
        shapes = shapes_given(base_name(planned.function), how, given)
        key = self._next, facts, shapes
        if key not in self._sized:
            whole = [shape for shape, _ in facts]
            before = [layout for _, layout in facts]
            self._sized[key] = size(planned, whole, before, shapes, self._axes)
        return self._sized[key]

    def _given(
        self, local: Tensor, place: int, layout: Layout, same: Mapping[int, ShardedTensor]
    ) -> ShardedTensor:
        """Wrap a result; a function that gives what it was given gives the same wrapper."""
        found = same.get(id(local))
        if found is None or found.held != layout:
            found = self.wrapped(local, layout)
        found.made_by = self._next - 1, place
        return found

    def _lifted(self, tensor: Tensor) -> ShardedTensor:
        return tensor if isinstance(tensor, ShardedTensor) else self.wrapped(tensor, self._whole)

    def _held_as(self, tensor: ShardedTensor, layout: Layout) -> Tensor:
        """Return what this device holds of a tensor that is to be in another layout."""
        known = tensor.known
        if layout not in known:
            known[layout] = convert(tensor.local, tensor.held, layout, self._axes)
        return known[layout]

    def _planned(self, func: Any) -> PlannedCall:
        name = resolve_name(func) or getattr(func, "__name__", "")
        if self._next == len(self._plan.calls):
            raise self._other_path(f"calls {name}")
        planned = self._plan.calls[self._next]
        if base_name(planned.function) != base_name(name):
            raise self._other_path(f"calls {name}")
        self._next += 1
        return planned

    def _other_path(self, does: str) -> PlanError:
        done, calls = self._next, self._plan.calls
        wanted = f"calls {calls[done].function}" if done < len(calls) else "ends"
        return PlanError(
            f"layer {self._plan.name!r} {does} as its call {done}, where its sharding {wanted}: "
            "its forward takes another path than on the example inputs. Give example inputs that "
            "take the same path as training, or keep the layer on one device"
        )
