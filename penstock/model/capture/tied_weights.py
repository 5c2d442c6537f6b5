"""Weights that several stages use: one of them has the parameter, the others are sent it.

The first stage that uses a parameter is its home.  For the others it is a value like any other,
whose gradient comes back for each micro-batch; so the terms add up in the order in which an
unsplit backward pass adds them, and there is one parameter to an optimizer and in checkpoints.
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

    `names` are all that it has in the model.  Where the model is spread over processes, the
    modules of one that is not the home hold parameters of their own, without values.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]

    @property
    def value(self) -> ValueId:
        """What it is called on its way."""
        return ValueId(EventKey(f"={self.names[0]}", 0, 0), 0)


def find_tied(
    parameters: Mapping[str, str],
    names_in: Callable[[str], Iterable[str]],
    stage_of: Mapping[BlockCall, int],
    events: Iterable[Placed],
) -> tuple[Tied, ...]:
    """Find the parameters that blocks, or code between them, use on several stages.

    `parameters` gives the first name of each parameter by all of its names, `names_in` the names
    in a block.
    """
    users: dict[str, set[int]] = {}
    for (block, _), stage in stage_of.items():
        for name in names_in(block):
            users.setdefault(parameters[name], set()).add(stage)
    for event, stage in events:
        for name in event.parameters:
            users.setdefault(parameters[name], set()).add(stage)
    return tuple(
        Tied(tuple(n for n, first in parameters.items() if first == name), tuple(sorted(found)))
        for name, found in users.items()
        if len(found) > 1
    )


def check_names(model: nn.Module, parameters: Mapping[str, str]) -> None:
    """Check that names mean one parameter, or several, as they did when the model was captured.

    Raises:
        CutError: a weight was tied since, or untied.
    """
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
    """Return the parameter called `name`, or what is in its place on a stage that borrows it."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    found: Tensor | None = owner.__dict__.get(last, parameters_of(owner).get(last))
    return found


def release(model: nn.Module, kept: Collection[str]) -> None:
    """Free the memory of all parameters but the `kept` ones.

    What takes the place of each is no parameter.
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
    """Takes the place of a parameter that another stage has: it has its shape, and no values.

    Kernels for the CPU would read what happens to lie there, so that it has to refuse itself.
    """

    name_in_model: str
    replaced: "weakref.ref[Tensor]"
    """What it took the place of, which a closure may still hold."""

    @classmethod
    def instead_of(cls, parameter: Tensor, name: str) -> "Absent":
        """Make one."""
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
        """Return the error for a read of its values."""
        return RouteError(
            f"the parameter '{self.name_in_model}' is read ({calling_line()}), which another "
            "stage has, where the example did not read it. Capture the model with an example "
            "that takes this path"
        )


def ids_of(place: Tensor) -> Iterator[int]:
    """Yield by what ids a block may come by a parameter, or by what is in its place."""
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
"""What the block that runs now is lent."""


_REENTRANT: ContextVar[bool] = ContextVar("penstock_reentrant", default=False)
"""Whether a reentrant checkpoint runs, which leaves out gradients until its backward."""


@contextmanager
def in_reentrant() -> Iterator[None]:
    """Note that a reentrant checkpoint runs its function."""
    token = _REENTRANT.set(torch.is_grad_enabled())
    try:
        yield
    finally:
        _REENTRANT.reset(token)


def lent_instead(value: Any) -> Any:
    """Return nested values with what was sent for parameters, while a block reads such."""
    lent = _LENDING.get()
    return value if lent is None else lent.replaced(value)


class Lent(TorchFunctionMode):
    """Lets operations read what was sent for a parameter instead of the parameter."""

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
        """Put what was sent for parameters into nested values."""
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
