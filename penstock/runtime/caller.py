"""The modes of a call that threads do not inherit: captured there, entered again by workers."""

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass

import torch
from torch.autograd.graph import disable_saved_tensors_hooks

from penstock.errors import ConfigError, ExecutionWarning
from penstock.torch_private import (
    cached_weights,
    disabled_hooks,
    dispatch_modes,
    function_modes,
    is_default_device,
    is_profiled,
    saving_hooks,
    without_cached_weights,
)

_around: ContextVar[tuple[str, ...] | None] = ContextVar("modes_around", default=None)
"""The modes that keep the pipeline around this layer in its calling thread; None without one."""


@dataclass(frozen=True, slots=True)
class _Autocast:
    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool


@dataclass(frozen=True, slots=True)
class CallerContext:
    """Grad mode, inference mode, autocast, default device, denormal numbers and context variables.

    `hooks_disabled` is what `disable_saved_tensors_hooks` was told; None where it was not entered.
    `bound` names the modes that no other thread can enter.
    """

    with_grad: bool
    inference: bool
    autocasts: tuple[_Autocast, ...]
    device: torch.device | None
    flushes: bool
    hooks_disabled: str | None
    variables: Context
    bound: tuple[str, ...]

    @classmethod
    def capture(cls, with_grad: bool, devices: Iterable[torch.device]) -> "CallerContext":
        """Note the calling thread's modes; grad mode is the run's own.

        Raises:
            ConfigError: that thread caches parametrized weights, and gradients are recorded.
        """
        if with_grad and cached_weights.depth:
            raise ConfigError(
                "the pipeline was called with gradients inside parametrize.cached(): a weight "
                "cached there would have one graph for all micro-batches and stages, which run in "
                "threads of their own. Leave that block, and enter it in the forward of the layer "
                "that reads a weight several times"
            )
        kinds = sorted({device.type for device in devices})
        return cls(
            with_grad=with_grad,
            inference=torch.is_inference_mode_enabled() and not with_grad,
            autocasts=tuple(
                _Autocast(
                    kind,
                    torch.is_autocast_enabled(kind),
                    torch.get_autocast_dtype(kind),
                    torch.is_autocast_cache_enabled(),
                )
                for kind in kinds
            ),
            device=_default_device(),
            flushes=_flushes(),
            hooks_disabled=disabled_hooks(),
            variables=copy_context(),
            bound=_bound_modes(),
        )

    @property
    def casts(self) -> bool:
        """Whether autocast is on."""
        return any(mode.enabled for mode in self.autocasts)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Work under the captured modes inside."""
        if _flushes() != self.flushes:
            torch.set_flush_denormal(self.flushes)
        token = _around.set(self.bound)
        with ExitStack() as stack:
            stack.callback(_around.reset, token)
            if cached_weights.depth:
                stack.enter_context(without_cached_weights())
            if self.device is not None and _default_device() != self.device:
                stack.enter_context(self.device)
            if self.hooks_disabled is not None:
                stack.enter_context(disable_saved_tensors_hooks(self.hooks_disabled))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.with_grad))
            for mode in self.autocasts:
                if mode.enabled or torch.is_autocast_enabled(mode.device_type):
                    stack.enter_context(
                        torch.autocast(
                            mode.device_type,
                            mode.dtype,
                            enabled=mode.enabled,
                            cache_enabled=mode.cache,
                        )
                    )
            yield

    def check_hooks(self, what_for: str) -> None:
        """Refuse a step that needs saved_tensors_hooks, as `what_for` says, where they are
        disabled.

        Raises:
            ConfigError: it needs them.
        """
        if self.with_grad and self.hooks_disabled is not None and what_for:
            raise ConfigError(
                "the pipeline was called under disable_saved_tensors_hooks"
                f"({self.hooks_disabled!r}), and such hooks are needed by {what_for}. Leave that "
                "block, or use recompute=Recompute.NEVER, no offload and no trace of memory"
            )

    def stays(self) -> bool:
        """Tell whether a run must stay in the calling thread, and warn that it does."""
        if self.bound and _around.get() is None:
            warnings.warn(
                f"the pipeline was called under {', '.join(self.bound)}, which torch applies to "
                "the calling thread only: this call runs all stages there, one after the other, "
                "with the same results. Leave it for speed, or set "
                "transport=Transport.LOOPBACK for silence",
                ExecutionWarning,
                stacklevel=4,
            )
        return bool(self.bound)


def _bound_modes() -> tuple[str, ...]:
    """Name the modes of this thread that apply to it alone; inside a layer of another pipeline,
    those around that one.
    """
    around = _around.get()
    if around is not None:
        return around
    modes = [m for m in function_modes() if not is_default_device(m)] + dispatch_modes()
    names = dict.fromkeys(type(mode).__name__ for mode in modes)
    if saving_hooks() is not None:
        names["saved_tensors_hooks"] = None
    if is_profiled():
        names["a profiler"] = None
    return tuple(names)


def _default_device() -> torch.device | None:
    """Return the default device, if one was chosen."""
    if any(map(is_default_device, function_modes())):
        return torch.get_default_device()
    return None


def _flushes(half: float = 0.5) -> bool:
    """Tell whether this thread takes denormal numbers for 0 (`torch.set_flush_denormal`)."""
    return sys.float_info.min * half == 0


@contextmanager
def fresh_casts() -> Iterator[None]:
    """Let a run neither find torch's casts of weights nor leave any, as long as no layer of
    another pipeline runs around it.

    An autocast of the caller's keeps its casts until it ends, also of weights that an optimizer
    has moved since.
    """
    if _around.get() is None:
        torch.clear_autocast_cache()
    try:
        yield
    finally:
        if _around.get() is None:
            torch.clear_autocast_cache()


@contextmanager
def keeping_casts() -> Iterator[None]:
    """Let no autocast that ends inside clear torch's casts of weights: all threads share those."""
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
