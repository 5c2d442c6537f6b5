"""Opaque modules: classes whose forward reads values, or loops over them, seen as one function.

    experts(x, which, shares)  ──►  function(x, which, shares, up, down)    one call of a graph
                                        │
            on tensors without values   │   on values
            the stand-in: as much work  ▼   what is said to run on shards

Dimensions have letters, as in the rules of sharding: one that has a letter may be cut.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from penstock.model.capture.watch import original_class
from penstock.torch_private import parameters_of


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueModule:
    """How calls of modules of a class are recorded, and run in shards.

    Attributes:
        name: the class, with where it lives.
        takes: letters of the dimensions of each tensor that the forward takes, in order.
        weights: those of each parameter that it uses, by name.
        gives: those of its result.
        stand_in: called with the module, what it takes and its weights, on tensors without values;
            does as many operations as the forward, and gives what has its result's shape.
        run: called likewise, on shards, and with `starts`, a mapping that says by letter where the
            own slice begins; gives the own part of the result.
    """

    name: str
    takes: tuple[str, ...]
    weights: Mapping[str, str]
    gives: str
    stand_in: Callable[..., Tensor]
    run: Callable[..., Tensor]

    @property
    def letters(self) -> tuple[str, ...]:
        """The letters of all that its function takes."""
        return (*self.takes, *self.weights.values())


OPAQUE: dict[str, OpaqueModule] = {}
"""By the name of the class, which is the name of the function, too."""


def opaque_module(own: OpaqueModule) -> None:
    """Register how modules of a class are recorded, and run in shards."""
    OPAQUE[own.name] = own


def opaque_of(module: nn.Module) -> OpaqueModule | None:
    """Return what is known of a module that is opaque; None of others."""
    kind = original_class(module)
    return OPAQUE.get(f"{kind.__module__}.{kind.__qualname__}")


def reader_of(error: BaseException) -> str:
    """Name the class of the innermost module that was running, but torch's own: it may have read
    the values that an error asks for.
    """
    found, trace = "its module", error.__traceback__
    while trace is not None:
        own = trace.tb_frame.f_locals.get("self")
        kind = original_class(own) if isinstance(own, nn.Module) else nn.Module
        if not kind.__module__.startswith("torch."):
            found = f"{kind.__module__}.{kind.__qualname__}"
        trace = trace.tb_next
    return found


@contextmanager
def as_functions(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Have calls of opaque modules shown to modes and to subclasses of tensors, as functions."""
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    changed = []
    try:
        for part in parts:
            own = opaque_of(part)
            if own is not None and "forward" not in vars(part):
                changed.append(part)
                part.forward = partial(_forward, part, own, part.forward)
        yield
    finally:
        for part in changed:
            del part.forward


def _forward(
    module: nn.Module, own: OpaqueModule, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    given = inspect.signature(forward).bind(*args, **kwargs).args
    tensors = (*given, *(parameters_of(module)[name] for name in own.weights))
    if not has_torch_function(tensors):
        return forward(*args, **kwargs)

    def function(*tensors: Tensor, starts: Mapping[str, int] | None = None) -> Tensor:
        if any(tensor.is_meta for tensor in tensors):
            return own.stand_in(module, *tensors)
        return own.run(module, *tensors, starts=starts or {})

    function.__name__ = own.name
    return handle_torch_function(function, tensors, *tensors)


# -- those of transformers ------------------------------------------------------------------------

# t tokens, e experts: x (t, D), which expert and its share (t, K), up (e, 2H, D), down (e, D, H)


def _like_experts(
    module: Any, x: Tensor, which: Tensor, shares: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """Give each token to the first expert, as often as it has experts."""
    rows = x.repeat_interleave(which.shape[1], 0)
    found = _expert(module, rows, up[0], down[0]) * shares.reshape(-1, 1)
    summed: Tensor = found.view(*which.shape, -1).sum(1).to(x.dtype)
    return summed


def _run_experts(  # noqa: PLR0913 - all that experts take
    module: Any,
    x: Tensor,
    which: Tensor,
    shares: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    starts: Mapping[str, int],
) -> Tensor:
    """Add up what the experts that are here find for their tokens."""
    result = torch.zeros_like(x)
    for number, (wide, narrow) in enumerate(zip(up, down, strict=True), starts.get("e", 0)):
        token, place = torch.where(which == number)
        found = _expert(module, x[token], wide, narrow) * shares[token, place, None]
        result = result.index_add(0, token, found.to(result.dtype))
    return result


def _expert(module: Any, rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, wide = F.linear(rows, up).chunk(2, dim=-1)
    return F.linear(module.act_fn(gate) * wide, down)


opaque_module(
    OpaqueModule(
        name="transformers.models.mixtral.modeling_mixtral.MixtralExperts",
        takes=("t.", "t.", "t."),
        weights={"gate_up_proj": "e..", "down_proj": "e.."},
        gives="t.",
        stand_in=_like_experts,
        run=_run_experts,
    )
)
