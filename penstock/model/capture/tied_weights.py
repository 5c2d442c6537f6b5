"""Tied weights across stages: one stage has the parameter, and sends it to the others.

The first stage that uses a parameter is its home.  The others receive it as a value, and send a
gradient back for each micro-batch.  So the terms add up in the order of an unsplit backward.  An
optimizer and a checkpoint see one parameter.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.errors import CutError, RouteError
from penstock.model.pytree import Sealed, flatten
from penstock.torch_private import (
    buffers_of,
    parameters_of,
    version_counter,
    without_torch_function,
)

from .errors import calling_line
from .events import EventKey, ValueId
from .ghost import QUESTIONS, map_tensors
from .routes import BlockCall, Placed


@dataclass(frozen=True, slots=True)
class Tied:
    """A parameter that is used on `stages`; the first one is its home.

    `names` are all its names in the model.  In a process without the home, the modules hold
    separate parameters without values.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]

    @property
    def value(self) -> ValueId:
        """The name of the parameter as a value between stages."""
        return ValueId(EventKey(f"={self.names[0]}", 0, 0), 0)


def find_tied(
    parameters: Mapping[str, str],
    names_in: Callable[[str], Iterable[str]],
    stage_of: Mapping[BlockCall, int],
    events: Iterable[Placed],
) -> tuple[Tied, ...]:
    """Find the parameters that blocks, or code between them, use on several stages.

    `parameters` maps each name of a parameter to its first name; `names_in` returns the names in
    a block.
    """
    users: dict[str, set[int]] = {}
    for (block, _), stage in stage_of.items():
        for name in names_in(block):
            users.setdefault(parameters[name], set()).add(stage)
    for event, stage in events:
        for name in event.parameters:
            users.setdefault(parameters[name], set()).add(stage)
    return tuple(
        Tied(tuple(n for n, first in parameters.items() if first == name), tuple(sorted(stages)))
        for name, stages in users.items()
        if len(stages) > 1
    )


def check_names(model: nn.Module, parameters: Mapping[str, str]) -> None:
    """Raise CutError if a weight was tied, or untied, since the model was captured."""
    of_first: dict[str, int] = {}
    firsts: dict[int, str] = {}
    for name, first in parameters.items():
        tensor = find_tensor(model, name)
        if tensor is None or isinstance(tensor, Absent):
            continue
        known, other = of_first.setdefault(first, id(tensor)), firsts.setdefault(id(tensor), first)
        if known != id(tensor) or other != first:
            with_it = first if known != id(tensor) else other
            raise CutError(
                f"'{name}' and '{with_it}' were one parameter when the model was captured and are "
                "not now, or the other way round (load_state_dict(assign=True), an assignment); "
                "capture the model again"
            )


def find_tensor(model: nn.Module, name: str) -> Tensor | None:
    """Return the parameter `name`, or its stand-in on a stage that borrows it."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    tensor: Tensor | None = owner.__dict__.get(last, parameters_of(owner).get(last))
    return tensor


def release(model: nn.Module, kept: Collection[str]) -> None:
    """Free the memory of all parameters except the `kept` ones.

    Each is replaced by an `Absent`, which is not a parameter.
    """
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name in kept:
            continue
        path, _, last = name.rpartition(".")
        owner = model.get_submodule(path)
        if last in parameters_of(owner):
            parameters_of(owner)[last] = None
            owner.__dict__[last] = Absent.instead_of(parameter, name)


class Absent(Tensor, Sealed):
    """The stand-in for a parameter of another stage, with its shape and without values.

    CPU kernels would read arbitrary memory, so it refuses every operation itself.
    """

    name_in_model: str
    replaced: "weakref.ref[Tensor]"
    """The replaced parameter, which a closure may still hold."""

    @classmethod
    def instead_of(cls, parameter: Tensor, name: str) -> "Absent":
        """Make the stand-in of a parameter."""
        bare = torch.empty_like(parameter, device="meta", requires_grad=False)
        absent = bare.as_subclass(cls)
        absent.name_in_model, absent.replaced = name, weakref.ref(parameter)
        return absent

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in QUESTIONS:
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        raise next(t for t in flatten((args, kwargs or {}))[0] if isinstance(t, cls)).is_read()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Absent":
        return self  # there are no values to copy

    def is_read(self) -> RouteError:
        """Return the error for a read of the values."""
        return RouteError(
            f"the parameter '{self.name_in_model}' is read ({calling_line()}), which another "
            "stage has, where the example did not read it. Capture the model with an example "
            "that takes this path"
        )


def ids_of(place: Tensor) -> Iterator[int]:
    """Yield the ids by which a block may refer to a parameter, or to its stand-in."""
    yield id(place)
    if isinstance(place, Absent) and (old := place.replaced()) is not None:
        yield id(old)


def empty_buffers(module: nn.Module) -> None:
    """Free the memory of a block's buffers."""
    for part in module.modules():
        for name, buffer in buffers_of(part).items():
            if buffer is not None:
                buffers_of(part)[name] = torch.empty_like(buffer, device="meta")


_LENDING: "ContextVar[Lent | None]" = ContextVar("penstock_lent", default=None)
"""The borrowed parameters of the block that runs now."""


_REENTRANT: ContextVar[bool] = ContextVar("penstock_reentrant", default=False)
"""True while a reentrant checkpoint runs, which records no gradients until its backward."""


@contextmanager
def in_reentrant() -> Iterator[None]:
    """Mark the run of a reentrant checkpoint's function."""
    token = _REENTRANT.set(torch.is_grad_enabled())
    try:
        yield
    finally:
        _REENTRANT.reset(token)


def lent_instead(value: Any) -> Any:
    """Replace borrowed parameters in nested values by the received ones, inside a block."""
    lent = _LENDING.get()
    return value if lent is None else lent.replaced(value)


class Lent(TorchFunctionMode):
    """Makes operations read the received values of borrowed parameters."""

    def __init__(self, sent: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.sent = sent

    def __enter__(self) -> "Lent":
        self._before = _LENDING.set(self)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # as above
        _LENDING.reset(self._before)

    def replaced(self, value: Any) -> Any:
        """Replace borrowed parameters in nested values by the received ones."""
        return map_tensors(lambda tensor: self.sent.get(id(tensor), tensor), value)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_grad_enabled() or func in QUESTIONS:
            return func(*self.replaced(args), **self.replaced(kwargs))
        read = [self.sent[id(t)] for t in flatten((args, kwargs))[0] if id(t) in self.sent]
        if read and _REENTRANT.get():
            raise CutError(
                f"a weight that several stages use is read in a reentrant checkpoint "
                f"({calling_line()}), whose backward would read it where it is not. Use "
                "checkpoint(..., use_reentrant=False), or keep the blocks that share it together "
                "(together=)"
            )
        versions = [version_counter(tensor) for tensor in read]
        result = func(*self.replaced(args), **self.replaced(kwargs))
        if [version_counter(tensor) for tensor in read] != versions:
            raise CutError(
                f"a block changes in place a weight that several stages use ({calling_line()}), "
                "and each stage has its own copy. Keep the blocks that share it together "
                "(together=)"
            )
        return result


def lending(lent: Lent, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a block with its borrowed parameters, also when a checkpoint runs it again."""
    with lent:
        return function(*args, **kwargs)
