"""Route calls of blocks, checkpoints and custom autograd functions to the pass under way."""

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
    uncompiled,
    wants_kwargs,
)

from .activation_checkpoints import reentrant, watch_checkpoints
from .ghost import CURRENT, ghosts_in
from .tied_weights import in_reentrant, lent_instead

_PARTS_OF_BLOCKS = ("torch.distributed", "penstock.")
_WATCHED: dict[tuple[type[nn.Module], bool], type[nn.Module]] = {}
"""What a class becomes, by itself and whether direct calls of its forward are seen."""


def watch(blocks: Mapping[str, nn.Module]) -> dict[int, str]:
    """Route each block's calls to the pass that is under way; there is no other change.

    A block's class becomes a subclass of its own, with the same name.

    Returns:
        The blocks' names by the id of their module.
    """
    for block in blocks.values():
        _watch(block)
    return {id(block): name for name, block in blocks.items()}


def _watch(block: nn.Module) -> None:
    kind = type(block)
    if any(base in _WATCHED.values() for base in kind.__mro__):
        return
    if is_parametrized(block) and len(kind.__bases__) == 1:
        # torch made this class for this module, and takes it away again to give the one below
        kind.__bases__ = (_watched(kind.__bases__[0], block),)
    else:
        block.__class__ = _watched(kind, block)


def _watched(kind: type[nn.Module], block: nn.Module) -> type[nn.Module]:
    # the forward of a compiled one is left alone: torch compiles its own modules' or not by where
    # they are written
    sees_forward = isfunction(getattr_static(kind, "forward")) and uncompiled(block) is None
    found = _WATCHED.get((kind, sees_forward))
    if found is None:
        found = _WATCHED[kind, sees_forward] = _make_watched(kind)
        if sees_forward:
            setattr(found, "forward", _watched_forward(kind))  # noqa: B010 - typed as a method
    return found


def original_class(module: nn.Module) -> type:
    """Return the class that a module had before it was watched."""
    kind = type(module)
    return kind.__mro__[1] if kind in _WATCHED.values() else kind


def _make_watched(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        native = kind.__call__  # looked up now: torch.export puts its own in its place
        current = CURRENT.get()
        if current is None or current.is_inside or not current.knows(self):
            return native(self, *args, **kwargs)
        if not forward_hooks_of(self) or not _observers(self):
            return current.block_call(self, partial(native, self), args, kwargs)
        return _observed_call(current, self, native, args, kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        """Pickle and copy it as what it was; a copy is watched when it is captured itself."""
        reduced = kind.__reduce_ex__(self, protocol)
        if isinstance(reduced, str):
            return reduced
        function, *rest = _unwatched(reduced)
        return partial(function), *rest  # pickle compares classes if it sees which function it is

    names = {"__call__": call, "__reduce_ex__": reduce, "__module__": kind.__module__}
    watched = type(kind.__name__, (kind,), names)
    watched.__qualname__ = kind.__qualname__
    return watched


def _watched_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Take a direct call for a call of the block, without its hooks."""
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
    """A forward hook that looks at a block from outside: not where the block itself is run."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = CURRENT.get()
        if current is not None and current.is_inside:
            return None
        return self.hook(*args, **kwargs)


def _observers(module: nn.Module) -> dict[int, _Outside]:
    """Return the forward hooks that look at a block from outside.

    Those of torch.distributed, and our own, belong to the block: they run where it runs.
    """
    found = {}
    for number, hook in list(forward_hooks_of(module).items()):
        if not isinstance(hook, _Outside):
            if getattr(hook, "__module__", "").startswith(_PARTS_OF_BLOCKS):
                continue
            hook = forward_hooks_of(module)[number] = _Outside(hook)
        found[number] = hook
    return found


def _observed_call(
    current: Any, module: nn.Module, native: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call a block, and its hooks on what stands for its result: so they run on every stage."""
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
"""In Python or in C, as the version of torch has it."""


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
    """Route checkpoints, and custom autograd functions of ghosts, to the pass under way; keep
    cached weights apart.
    """
    watch_checkpoints()
    cache_weights_per_thread()
    setattr(torch.autograd.Function, "apply", classmethod(_routed_apply))  # noqa: B010 - typed as one
