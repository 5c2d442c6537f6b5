"""Run a layer as its plan divides it: the layer's own Python, on tensors that hold a shard each.

    layer's input, whole ──► ShardedTensor (I) ──► layer's own forward ──► ShardedTensor ──► whole
                                                       │
                                    each function of torch: convert what it is given, run it on
                                    the shards, note the layouts of what it gives

A `ShardedTensor` reports the shape of the whole, so that code that looks at shapes is unchanged.
Autograd sees the shards and the conversions between them, and nothing else.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import resolve_name

from penstock.costs.classify import tensors_in
from penstock.errors import PlanError
from penstock.model.capture.ghost import is_question
from penstock.model.pytree import tree_map
from penstock.model.stage_plan import Step
from penstock.torch_private import parameters_of, without_torch_dispatch, without_torch_function

from .convert import convert
from .layouts import I, S, State
from .plan import LayerSharding, PlannedCall, Sharding
from .rules import base_name

if TYPE_CHECKING:
    from penstock.mesh.collectives import Collectives


class ShardedTensor(Tensor):
    """Stands for a whole tensor of which this device holds `local`, in some state.

    `known` are conversions of it that were made already, by state.
    """

    local: Tensor
    state: State
    run: "LayerRun"
    known: dict[State, Tensor]
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

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes what is of no use here
        return f"ShardedTensor({self.state!r}, shape {tuple(self.shape)})"


_OF_THE_SHARD = tuple(getattr(Tensor, name).__get__ for name in ("requires_grad", "device"))
"""Questions whose answer is that of the shard."""


def _answer(func: Any, args: Any, kwargs: Any) -> Any:
    """Answer a question about the whole by its shape, or by the shard where it is the same."""
    if func in _OF_THE_SHARD:
        return func(args[0].local)
    with without_torch_function():
        return func(*args, **kwargs)


@lru_cache(maxsize=4096)
def _bare(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    with without_torch_function():
        return torch.empty(shape, dtype=dtype, device="meta")


def _sharded(value: Any) -> Iterator[ShardedTensor]:
    return (tensor for tensor in tensors_in(value) if isinstance(tensor, ShardedTensor))


class DividedLayer:
    """A layer that is run in shards along an axis; its weights are at rest as the plan says."""

    def __init__(self, module: nn.Module, plan: LayerSharding, axis: "Collectives") -> None:
        self._module, self.plan, self.axis = module, plan, axis
        states = {id(p): plan.weights.get(name, I) for name, p in module.named_parameters()}
        self._places = [
            (parameters_of(part), name, states[id(parameter)])
            for part in module.modules()
            for name, parameter in parameters_of(part).items()
            if parameter is not None
        ]

    def cut_weights(self) -> None:
        """Keep this device's shard of each weight only; each parameter stays the same object."""
        with torch.no_grad():
            for weight, state in self.cut().items():
                weight.data = convert(weight.data, I, state, self.axis).clone()

    def cut(self) -> dict[Tensor, S]:
        """Return the state of each weight that is cut."""
        found = ((parameters[name], state) for parameters, name, state in self._places)
        return {w: state for w, state in found if isinstance(state, S) and w is not None}

    def call(self, function: "partial[Any]") -> Any:
        """Call the layer; what it is given and what it gives is whole."""
        run = LayerRun(self.plan, self.axis)
        args, kwargs = tree_map(run.whole, (function.args, function.keywords))
        with self._lent(run):
            result = function.func(*args, **kwargs)
        run.check_ended()
        return tree_map(run.made_whole, result)

    @contextmanager
    def _lent(self, run: "LayerRun") -> Iterator[None]:
        """Let the modules have what stands for their weights meanwhile."""
        own = [(parameters, name, parameters[name]) for parameters, name, _ in self._places]
        try:
            for (parameters, name, state), (*_, parameter) in zip(self._places, own, strict=True):
                parameters[name] = run.wrapped(parameter, state)
            yield
        finally:
            for parameters, name, parameter in own:
                parameters[name] = parameter


class Shards:
    """The layers of this process that are divided, by number, along an axis."""

    def __init__(
        self, sharding: Sharding | None, steps: Iterable[Step], axis: "Collectives"
    ) -> None:
        self.sharding, self._axis = sharding, axis
        own = [] if sharding is None else [(s, sharding.layers[s.index]) for s in steps]
        self.layers = {
            s.index: DividedLayer(s.module, plan, axis) for s, plan in own if plan.is_divided
        }

    def cut_weights(self, tensors: Iterable[Tensor]) -> None:
        """Let all shards have the values of the first one; keep the own shard of what is cut."""
        if self.sharding is None:
            return
        self._axis.copy_from_first(tensors, "for the first shard's parameters and buffers")
        for layer in self.layers.values():
            layer.cut_weights()

    def named(self, weights: Mapping[str, Tensor]) -> "CutWeights":
        """Return what this process holds of weights, by their names."""
        return CutWeights(weights, self.layers.values())


class CutWeights:
    """What this process holds of weights that are cut, by the name of each."""

    def __init__(self, named: Mapping[str, Tensor], layers: Iterable[DividedLayer]) -> None:
        own = {
            weight: (state, layer.axis, tuple(weight.shape))
            for layer in layers
            for weight, state in layer.cut().items()
        }
        self._weights = own.keys()
        self._cut = {name: own[weight] for name, weight in named.items() if weight in own}

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
        if found is None or tuple(tensor.shape) != found[2]:
            return tensor
        state, axis, _ = found
        with torch.no_grad():
            return convert(tensor, state, I, axis)

    def _take(self, key: str, value: Any, of_optimizer: bool) -> Any:
        found = self._cut.get(key.rpartition(".")[0] if of_optimizer else key)
        if found is None or not isinstance(value, Tensor):
            return value
        state, axis, shape = found
        lengths = list(shape)
        lengths[state.dim] *= axis.size
        return convert(value, I, state, axis) if list(value.shape) == lengths else value


class LayerRun:
    """One call of a divided layer: which of its planned calls comes next."""

    def __init__(self, plan: LayerSharding, axis: "Collectives") -> None:
        self._plan, self._axis, self._next = plan, axis, 0

    def whole(self, tensor: Tensor) -> Tensor:
        """Wrap a tensor that each device has."""
        return self.wrapped(tensor, I)

    def wrapped(self, local: Tensor, state: State) -> ShardedTensor:
        """Wrap what this device holds of a tensor."""
        shape = list(local.shape)
        if isinstance(state, S):
            shape[state.dim] *= self._axis.size
        with without_torch_function():
            found = _bare(tuple(shape), local.dtype).as_subclass(ShardedTensor)
        found.local, found.state, found.run, found.known = local, state, self, {state: local}
        return found

    def made_whole(self, tensor: Tensor) -> Tensor:
        """Unwrap what a layer gives, as a tensor that each device has."""
        if not isinstance(tensor, ShardedTensor):
            return tensor
        return self._in_state(tensor, I)

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
        given = dict.fromkeys(_sharded((args, kwargs)))
        if len(given) != len(planned.choice.takes):
            raise self._other_path(f"gives {len(given)} tensors to {planned.function}")
        states = dict(zip(map(id, given), planned.choice.takes, strict=True))
        local_args, local_kwargs = tree_map(
            lambda t: self._in_state(t, states[id(t)]), (args, kwargs)
        )
        kernel = _KERNELS.get(base_name(planned.function), _run_plainly)
        result = kernel(func, local_args, local_kwargs, planned.choice.gives, self._axis)
        gives = iter(planned.choice.gives)
        same = {id(tensor.local): tensor for tensor in given}
        return tree_map(lambda local: self._given(local, next(gives), same), result)

    def _given(
        self, local: Tensor, state: State, same: Mapping[int, ShardedTensor]
    ) -> ShardedTensor:
        """Wrap a result; a function that gives what it was given gives the same wrapper."""
        found = same.get(id(local))
        return found if found is not None and found.state == state else self.wrapped(local, state)

    def _lifted(self, tensor: Tensor) -> ShardedTensor:
        return tensor if isinstance(tensor, ShardedTensor) else self.wrapped(tensor, I)

    def _in_state(self, tensor: Any, state: State) -> Tensor:
        """Return what this device holds of a ShardedTensor that is to be in another state."""
        known: dict[State, Tensor] = tensor.known
        if state not in known:
            known[state] = convert(tensor.local, tensor.state, state, self._axis)
        return known[state]

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


# -- functions that need more than to be run on shards --------------------------------------------

_Kernel = Callable[[Any, Any, Any, Sequence[State], "Collectives"], Any]


def _run_plainly(
    func: Any, args: Any, kwargs: Any, gives: Sequence[State], axis: "Collectives"
) -> Any:
    return func(*args, **kwargs)


def _view(func: Any, args: Any, kwargs: Any, gives: Sequence[State], axis: "Collectives") -> Any:
    """Divide the length of the dimension that is cut in the shape that is asked for."""
    (state,) = gives
    if not isinstance(state, S):
        return func(*args, **kwargs)
    tensor, *shape = args
    lengths = list(shape[0]) if shape and isinstance(shape[0], tuple | list) else list(shape)
    if lengths[state.dim] != -1:
        lengths[state.dim] //= axis.size
    return func(tensor, tuple(lengths))


def _unflatten(
    func: Any, args: Any, kwargs: Any, gives: Sequence[State], axis: "Collectives"
) -> Any:
    (state,) = gives
    tensor, dim, sizes = args
    lengths, place = list(sizes), dim % tensor.dim()
    at = state.dim - place if isinstance(state, S) else -1
    if 0 <= at < len(lengths) and lengths[at] != -1:
        lengths[at] //= axis.size
    return func(tensor, dim, tuple(lengths))


def _dropout(
    func: Any, args: Any, kwargs: Any, gives: Sequence[State], axis: "Collectives"
) -> Any:
    """Draw for the whole tensor, so that the numbers are those of one device."""
    (state,) = gives
    if not isinstance(state, S):
        return func(*args, **kwargs)
    tensor, *rest = args
    shape = list(tensor.shape)
    shape[state.dim] *= axis.size
    ones = torch.ones(shape, dtype=tensor.dtype, device=tensor.device)
    drawn: Tensor = F.dropout(ones, *rest, **kwargs)
    return tensor * drawn.tensor_split(axis.size, state.dim)[axis.rank]


_KERNELS: dict[str, _Kernel] = {
    "view": _view,
    "reshape": _view,
    "unflatten": _unflatten,
    "dropout": _dropout,
}
