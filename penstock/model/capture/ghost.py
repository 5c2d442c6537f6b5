"""Ghosts: tensors without values, in the place of tensors of this stage or another one.

Every operation on a ghost goes to the current pass.  Questions about its shape, type and device
are answered at once.
"""

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from penstock.errors import GlueError
from penstock.model.entries import layout_on
from penstock.model.pytree import flatten, unflatten
from penstock.torch_private import (
    without_any_torch_function,
    without_torch_dispatch,
    without_torch_function,
)

from .events import Info


class AbstractPass(Protocol):
    """The interface of a pass for ghosts, blocks and checkpoints.

    Args:
        is_inside: a block or an operation runs natively; nothing in it is an event.
        is_answering: a question about a ghost is being answered.
        asks_for_grad: the code between blocks has asked for the gradient mode.
        checkpoint: the checkpoint that the model has put around the blocks that it calls now.
    """

    is_inside: bool
    is_answering: bool
    asks_for_grad: bool
    checkpoint: Callable[..., Any] | None

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle an operation on ghosts."""

    def block_call(
        self, module: nn.Module, native: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Handle a call of one of the blocks."""

    def knows(self, module: nn.Module) -> bool:
        """Tell whether a module is a block of this pass."""

    def below_torch_function(self, function: Any) -> GlueError:
        """Return the error for an operation that passes cannot follow."""


CURRENT: ContextVar[AbstractPass | None] = ContextVar("penstock_pass", default=None)
"""The current pass of this thread."""


class Ghost(Tensor):
    """A meta tensor in the place of a routed tensor; `here` is that tensor, if this stage has it.

    `home` is the identity of its pass.  If devices share a stage, `here` may be a slice with a
    layout; questions about the ghost are still answered for the whole tensor.
    """

    info: Info
    here: Tensor | None
    home: object
    __hash__: ClassVar[Any] = Tensor.__hash__

    @classmethod
    def standing_for(cls, info: Info, real: Tensor | None, home: object) -> "Ghost":
        """Make a ghost."""
        ghost = bare(info.shape, info.strides, info.dtype).as_subclass(cls)
        ghost.info, ghost.here, ghost.home = info, real, home
        return ghost

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        current = CURRENT.get()
        if current is None:
            raise _used_outside(flatten((args, kwargs or {}))[0])
        with without_torch_function():
            return current.operation(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as an instance's method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        current = CURRENT.get()
        if current is not None and not current.is_answering:
            if func.name() == "aten::_local_scalar_dense":
                # torch takes a tensor for a number, as in arange(tensor), unseen by its class
                return cls.__torch_function__(Tensor.item, (cls,), args)
            raise current.below_torch_function(func)
        with without_torch_dispatch():
            return func(*args, **(kwargs or {}))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes what is of no use here
        return f"Ghost({self.info.value}, shape {self.info.shape})"


def _used_outside(tensors: list[Tensor]) -> GlueError:
    ghost = next(tensor for tensor in tensors if type(tensor) is Ghost)
    value = str(ghost.info.value).removeprefix("the ")
    return GlueError(
        f"what stands for the {value} is used where no forward of its stage is under "
        "way: a hook or a global variable has kept it, or the code between blocks has given it to "
        "another thread. To get what blocks give, capture the model with keep=[names of blocks], "
        "and eval_step returns it; let threads work inside a block only"
    )


@lru_cache(maxsize=512)  # a step has some dozens; 300 lengths would keep 4,000
def bare(shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor:
    """Make a tensor without values; it never changes, so that ghosts may share it."""
    with without_any_torch_function():  # hide it from recorders of operators
        if strides is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _size(ghost: Ghost, dim: int | None = None) -> Any:
    return torch.Size(ghost.info.shape) if dim is None else ghost.info.shape[dim]


def _is_on(kind: str, ghost: Ghost) -> bool:
    return ghost.info.device.type == kind


def _requires_grad(ghost: Ghost) -> bool:
    current = CURRENT.get()
    if current is not None:
        current.asks_for_grad = True
    return ghost.info.requires_grad


def _set_requires_grad(ghost: Ghost, value: bool) -> None:
    Tensor.requires_grad.__set__(ghost, value)  # type: ignore[attr-defined]  # a C attribute


_ATTRIBUTES: dict[str, Any] = {
    "shape": property(_size),
    "dtype": property(lambda ghost: ghost.info.dtype),
    "device": property(lambda ghost: ghost.info.device),
    "ndim": property(lambda ghost: len(ghost.info.shape)),
    "requires_grad": property(_requires_grad, _set_requires_grad),
    "is_meta": property(lambda ghost: False),
    **{f"is_{kind}": property(partial(_is_on, kind)) for kind in ("cuda", "cpu", "mps", "xpu")},
    "size": _size,
    "dim": lambda ghost: len(ghost.info.shape),
    "is_floating_point": lambda ghost: ghost.info.dtype.is_floating_point,
}
"""The most frequent questions, answered without torch, which would take ten times as long."""
for _name, _answer in _ATTRIBUTES.items():
    setattr(Ghost, _name, _answer)


def ghosts_in(*values: Any) -> list[Ghost]:
    """List the ghosts in nested values, each once, in order."""
    found: dict[int, Ghost] = {}
    for value in values:
        _find(value, found)
    return list(found.values())


def _find(value: Any, found: dict[int, Ghost]) -> None:
    kind = type(value)
    if kind is Ghost:
        found.setdefault(id(value), value)
    elif kind is tuple or kind is list or kind is dict:
        for part in value.values() if kind is dict else value:
            _find(part, found)
    elif kind not in PLAIN and not isinstance(value, Tensor):
        found.update((id(leaf), leaf) for leaf in flatten(value)[0] if type(leaf) is Ghost)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Replace every tensor in nested values; return a value without tensors unchanged."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, Tensor):
        return function(value)
    if kind is tuple:
        return tuple([map_tensors(function, part) for part in value])
    if kind is list:
        return [map_tensors(function, part) for part in value]
    if kind is dict:
        return {key: map_tensors(function, part) for key, part in value.items()}
    leaves, structure = flatten(value)
    return unflatten(structure, [function(leaf) for leaf in leaves]) if leaves else value


PLAIN = frozenset(
    (
        *(type(None), bool, int, float, complex, str, slice),
        *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)


_ASKED = (
    *("shape", "dtype", "ndim", "device", "requires_grad", "is_leaf", "layout", "grad_fn"),
    *("is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_quantized"),
    *("is_nested", "is_mkldnn", "names", "itemsize", "nbytes"),
)
QUESTIONS = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in _ASKED if hasattr(Tensor, name)),
        *(Tensor.size, Tensor.dim, Tensor.stride, Tensor.numel, Tensor.is_floating_point),
        *(Tensor.is_contiguous, Tensor.element_size, Tensor.get_device, Tensor.is_complex),
        *(Tensor.ndimension, Tensor.nelement, Tensor.is_signed, Tensor.__len__, Tensor.type),
        *(Tensor.storage_offset, Tensor.is_inference, Tensor.is_same_size, Tensor.is_shared),
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor),
        *(torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int),
        *(torch.ops.aten.sym_numel.default, torch.ops.aten.sym_storage_offset.default),
    )
)
"""Attributes and calls whose answers do not depend on a tensor's values."""


OF_A_PART = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn")),
        *(getattr(Tensor, f"is_{kind}").__get__ for kind in ("cuda", "cpu", "meta", "mps", "xpu")),
        *(Tensor.device.__get__, Tensor.get_device, Tensor.is_inference, Tensor.is_shared),
        Tensor.type,
    )
)
"""The questions with the same answer for a slice and for the whole tensor."""


def is_question(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call is one of `QUESTIONS`."""
    if function is Tensor.type:  # with an argument, it returns a tensor
        return len(args) == 1 and not kwargs
    return function in QUESTIONS


def answer(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer a question of `QUESTIONS` about a ghost."""
    ghost = args[0]
    if function in _BY_INFO:
        return _BY_INFO[function](ghost.info)
    if ghost.here is not None and (function in OF_A_PART or layout_on(ghost.here) is None):
        args = tuple(part.here if type(part) is Ghost else part for part in args)
    return function(*args, **kwargs)


def _type_name(info: Info) -> str:
    name, kind = torch.empty(0, dtype=info.dtype).type(), info.device.type
    return name if kind == "cpu" else name.replace("torch.", f"torch.{kind}.")


_BY_INFO: dict[Any, Callable[[Info], Any]] = {
    Tensor.type: _type_name,
    Tensor.get_device: lambda info: -1 if info.device.index is None else info.device.index,
}
