"""The modes of a call that threads do not inherit: captured there, entered again by workers."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class _Autocast:
    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool


@dataclass(frozen=True, slots=True)
class CallerContext:
    """Grad mode, inference mode, autocast and context variables of the calling thread."""

    with_grad: bool
    inference: bool
    autocasts: tuple[_Autocast, ...]
    variables: Context

    @classmethod
    def capture(cls, with_grad: bool, devices: Iterable[torch.device]) -> "CallerContext":
        """Note the calling thread's modes; grad mode is the run's own."""
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
            variables=copy_context(),
        )

    @property
    def casts(self) -> bool:
        """Whether autocast is on."""
        return any(mode.enabled for mode in self.autocasts)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Work under the captured modes inside."""
        with ExitStack() as stack:
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


@contextmanager
def keeping_casts() -> Iterator[None]:
    """Let no autocast that ends inside clear torch's casts of weights: all threads share those."""
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
