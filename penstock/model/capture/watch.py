"""Route calls of blocks, checkpoints and custom autograd functions to the current pass."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial, update_wrapper
from inspect import getattr_static, isfunction
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.checkpoint import CheckpointFunction

from penstock.torch_private import (
    cache_weights_per_thread,
    forward_hooks_of,
    replace_checkpoint_generator,
    uncompiled,
    wants_kwargs,
)

from .activation_checkpoints import reentrant, routed_generator
from .ghost import CURRENT, ghosts_in
from .tied_weights import in_reentrant, lent_instead

_PARTS_OF_BLOCKS = ("torch.distributed", "penstock.")
_WATCHED: dict[tuple[type[nn.Module], bool], type[nn.Module]] = {}
"""(class, direct calls of its forward are seen) -> the watched subclass."""


def watch(blocks: Mapping[str, nn.Module]) -> dict[int, str]:
    """Route each block's calls to the current pass; return the blocks' names by their module's id.

    The class of a block becomes a subclass of itself, with the same name.
    """
    for block in blocks.values():
        _watch(block)
    return {id(block): name for name, block in blocks.items()}


def _watch(block: nn.Module) -> None:
    kind = type(block)
    if any(base in _WATCHED.values() for base in kind.__mro__):
        return
    if is_parametrized(block) and len(kind.__bases__) == 1:
        # torch made this class for this module only, and will restore the class below it.
        kind.__bases__ = (_watched(kind.__bases__[0], block),)
    else:
        block.__class__ = _watched(kind, block)


def _watched(kind: type[nn.Module], block: nn.Module) -> type[nn.Module]:
    # Leave the forward of a compiled module: torch decides by its source file how to compile it.
    sees_forward = isfunction(getattr_static(kind, "forward")) and uncompiled(block) is None
    watched = _WATCHED.get((kind, sees_forward))
    if watched is None:
        watched = _WATCHED[kind, sees_forward] = _make_watched(kind)
        if sees_forward:
            setattr(watched, "forward", _watched_forward(kind))  # noqa: B010 - typed as a method
    return watched


def original_class(module: nn.Module) -> type:
    """Return the class that a module had before it was watched."""
    kind = type(module)
    return kind.__mro__[1] if kind in _WATCHED.values() else kind


def _make_watched(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        native = kind.__call__  # looked up now, as torch.export replaces it
        current = CURRENT.get()
        if current is None or current.is_inside or not current.knows(self):
            return native(self, *args, **kwargs)
        if not forward_hooks_of(self) or not _observers(self):
            return current.block_call(self, partial(native, self), args, kwargs)
        return _observed_call(current, self, native, args, kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        """Pickle and copy the module with its original class; watch a copy when it is captured."""
        reduced = kind.__reduce_ex__(self, protocol)
        if isinstance(reduced, str):
            return reduced
        function, *rest = _unwatched(reduced)
        return partial(function), *rest  # pickle would compare classes for a known function

    names = {"__call__": call, "__reduce_ex__": reduce, "__module__": kind.__module__}
    watched = type(kind.__name__, (kind,), names)
    watched.__qualname__ = kind.__qualname__
    return watched


def _watched_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Treat a direct call as a call of the block, without its hooks."""
        native = kind.forward
        if torch.compiler.is_compiling():
            return native(self, *args, **kwargs)
        current = CURRENT.get()
        if current is None or current.is_inside or not current.knows(self):
            return native(self, *args, **kwargs)
        return current.block_call(self, partial(native, self), args, kwargs)

    update_wrapper(forward, kind.forward)
    return forward


def _unwatched(part: Any) -> Any:
    if isinstance(part, tuple):
        return tuple(_unwatched(entry) for entry in part)
    return part.__mro__[1] if isinstance(part, type) and part in _WATCHED.values() else part


class _Outside:
    """A user's forward hook, which runs on ghosts outside the block, on every stage."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = CURRENT.get()
        if current is not None and current.is_inside:
            return None
        return self.hook(*args, **kwargs)


def _observers(module: nn.Module) -> dict[int, _Outside]:
    """Return the user's forward hooks of a block.

    Hooks of torch.distributed and of Penstock belong to the block, and run where it runs.
    """
    observers = {}
    for number, hook in list(forward_hooks_of(module).items()):
        if not isinstance(hook, _Outside):
            if getattr(hook, "__module__", "").startswith(_PARTS_OF_BLOCKS):
                continue
            hook = forward_hooks_of(module)[number] = _Outside(hook)
        observers[number] = hook
    return observers


def _observed_call(
    current: Any, module: nn.Module, native: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call a block, then the user's hooks on the ghosts of its result, on every stage."""
    outside = _observers(module)
    result = current.block_call(module, partial(native, module), args, kwargs)
    for number, observer in outside.items():
        if wants_kwargs(module, number):
            changed = observer.hook(module, args, kwargs, result)
        else:
            changed = observer.hook(module, args, result)
        result = result if changed is None else changed
    return result


# -- functions of the user's own --------------------------------------------------------------

_native_apply = getattr_static(torch.autograd.Function, "apply")
"""torch's `apply`, in Python or in C."""


def _routed_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Handle a custom autograd function that is applied to ghosts between blocks."""
    current = CURRENT.get()
    if current is None or current.is_inside:
        with in_reentrant() if cls is CheckpointFunction else nullcontext():
            return _native_apply.__get__(None, cls)(*lent_instead(args), **lent_instead(kwargs))
    if cls is CheckpointFunction:
        return reentrant(current, *args)
    if not ghosts_in(args):
        return _native_apply.__get__(None, cls)(*args, **kwargs)

    def function(*a: Any, **k: Any) -> Any:
        return _native_apply.__get__(None, cls)(*a, **k)

    function.__name__ = f"{cls.__name__}.apply"
    return current.operation(function, args, kwargs)


def watch_functions() -> None:
    """Route checkpoints and custom autograd functions on ghosts to the current pass.

    Cached weights are kept per thread.
    """
    replace_checkpoint_generator(routed_generator)
    cache_weights_per_thread()
    setattr(torch.autograd.Function, "apply", classmethod(_routed_apply))  # noqa: B010 - typed as one
