"""Show calls of opaque modules as one function to recorders and to sharded tensors."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from penstock.model.capture.watch import original_class
from penstock.torch_private import parameters_of

from .opaque_modules import OPAQUE, OpaqueModule


def opaque_of(module: nn.Module) -> OpaqueModule | None:
    """Return the description of an opaque module; None for all others."""
    kind = original_class(module)
    return OPAQUE.get(f"{kind.__module__}.{kind.__qualname__}")


def reader_of(error: BaseException) -> str:
    """Return the innermost running class that is not torch's: it may have read the values."""
    name, trace = "its module", error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        kind = original_class(module) if isinstance(module, nn.Module) else nn.Module
        if not kind.__module__.startswith("torch."):
            name = f"{kind.__module__}.{kind.__qualname__}"
        trace = trace.tb_next
    return name


@contextmanager
def as_functions(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Show calls of opaque modules inside as functions to torch function modes and subclasses."""
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    changed = []
    try:
        for part in parts:
            opaque = opaque_of(part)
            if opaque is not None and "forward" not in vars(part):
                changed.append(part)
                part.forward = partial(_forward, part, opaque, part.forward)
        yield
    finally:
        for part in changed:
            del part.forward


def _forward(
    module: nn.Module, opaque: OpaqueModule, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    arguments = inspect.signature(forward).bind(*args, **kwargs).args
    tensors = (*arguments, *(parameters_of(module)[name] for name in opaque.weights))
    if not has_torch_function(tensors):
        return forward(*args, **kwargs)

    def function(*tensors: Tensor, starts: Mapping[str, int] | None = None) -> Tensor:
        if any(tensor.is_meta for tensor in tensors):
            return opaque.stand_in(module, *tensors)
        return opaque.run(module, *tensors, starts=starts or {})

    function.__name__ = opaque.name
    return handle_torch_function(function, tensors, *tensors)
