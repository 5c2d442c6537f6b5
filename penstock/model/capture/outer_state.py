"""Refuse state that a model's forward changes outside its blocks, as every stage would change it.

Settings are allowed: flags, and plain values that a first forward puts in place of nothing or
None.  An example is `config.problem_type`, which transformers models read off their labels.  Every
stage makes the same setting, if later forwards do not change it.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import Enum
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import CutError
from penstock.model.compare import is_same_plain
from penstock.model.kept import UNCOUNTED, as_before, holders, is_of_user, is_plain
from penstock.model.state import ABSENT
from penstock.torch_private import (
    BUFFERS,
    PARAMETERS,
    buffers_of,
    children_of,
    parameters_of,
    version_counter,
    without_cached_weights,
)

from .errors import calling_line
from .events import EventKey
from .ghost import CURRENT, Ghost
from .recording import Recording

_SETTINGS = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
_IS_IMMUTABLE = 1 << 8
"""Flag of a class written in C; writes to its objects cannot be observed."""


class Slot(NamedTuple):
    """A key of an object, its value, and the version of a tensor.

    `path` and `name` are the module and the attribute that lead to it.
    """

    holder: Any
    key: Any
    value: Any
    version: int
    path: str
    name: str


Slots = Mapping[tuple[int, Any], Slot]
"""Slots by the id of their object, and their key."""


def slots_outside(model: nn.Module, blocks: Collection[nn.Module]) -> Slots:
    """List the attributes of the modules outside blocks, and the content of these attributes.

    They include attributes of their classes, and global variables that their methods name.
    """
    slots: dict[tuple[int, Any], Slot] = {}
    inside = {id(part) for block in blocks for part in block.modules()}
    outside = ((path, m) for path, m in model.named_modules() if id(m) not in inside)
    attributes = ((path, m, *kept) for path, m in outside for kept in _attributes(m))
    for path, module, name, value in attributes:
        for holder, content in ((module, {name: value}), *holders([value])):
            for key, part in content.items():
                slot = Slot(holder, key, part, _version(part), path, name)
                slots.setdefault((id(holder), key), slot)
    return slots


def new_settings(before: Slots, after: Slots) -> list[Slot]:
    """List the settings that a forward has made; OwnState if it has changed something else."""
    settings = []
    for place in {**before, **after}:
        old, new = before.get(place), after.get(place)
        if (
            old is not None
            and new is not None
            and old.version == new.version
            and (old.value is new.value or is_same_plain(old.value, new.value))
        ):
            continue
        if new is not None and _is_setting(old, new):
            settings.append(new)
            continue
        # A flag of a module or its class is set once and never changes again.
        is_flag = new is not None and new.value is True and isinstance(new.holder, nn.Module)
        if old is not None or not is_flag:
            is_tensor = new is not None and new.key == new.name and isinstance(new.value, Tensor)
            raise changed_outside(*(new or before[place])[-2:], is_tensor=is_tensor)
    return settings


def _is_setting(old: Slot | None, new: Slot) -> bool:
    kind: type = type(new.holder)
    shows_sets = is_plain(kind) and not kind.__flags__ & _IS_IMMUTABLE
    if not isinstance(new.holder, nn.Module) and not shows_sets:
        return False
    if old is None or old.value is None:
        return str(new.key).isidentifier() and isinstance(new.value, _SETTINGS)
    return isinstance(old.value, bool) and isinstance(new.value, bool)


@contextmanager
def set_again(settings: Iterable[Slot]) -> Iterator[list[str]]:
    """Collect the names of settings of plain objects that are made again in this context."""
    names: list[str] = []
    places = {(id(slot.holder), slot.key) for slot in settings}

    def noting(native: Any) -> Any:
        def write(holder: Any, name: str, value: Any) -> None:
            if (id(holder), name) in places:
                names.append(name)
            native(holder, name, value)

        return write

    with ExitStack() as after:
        for kind in {type(s.holder) for s in settings if not isinstance(s.holder, nn.Module)}:
            if "__setattr__" in vars(kind):
                after.callback(setattr, kind, "__setattr__", vars(kind)["__setattr__"])
            else:
                after.callback(delattr, kind, "__setattr__")
            setattr(kind, "__setattr__", noting(kind.__setattr__))  # noqa: B010 - mypy knows its type
        yield names


def _version(value: Any) -> int:
    is_plain = isinstance(value, Tensor) and type(value) is not Ghost
    return version_counter(value) if is_plain else 0


@contextmanager
def as_it_was(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Run the model in one mode, and restore its modes, buffers and random states."""
    with without_cached_weights(), warnings.catch_warnings(), as_before([model]):
        # A checkpoint warns if no input requires a gradient.
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        if model.training != training:
            model.train(training)
        yield


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield attributes of a module and of its classes, and globals that their methods name."""
    for name, value in vars(module).items():
        if name in (BUFFERS, PARAMETERS):
            yield from ((key, tensor) for key, tensor in value.items() if tensor is not None)
        elif name not in UNCOUNTED:
            yield name, value
    of_classes = (
        (k, *kept) for k in type(module).__mro__ if is_of_user(k) for kept in vars(k).items()
    )
    for kind, name, value in of_classes:
        if isinstance(value, FunctionType):
            known = value.__globals__
            yield from ((f"global {n}", known[n]) for n in value.__code__.co_names if n in known)
        elif not name.startswith("__"):
            yield f"{kind.__name__}.{name}", value


class OwnState(CutError):
    """A module outside blocks changes its state; `path` is its name, "" if it is no attribute."""

    def __init__(self, message: str, path: str, name: str) -> None:
        super().__init__(message)
        self.path, self.name = path, name


def changed_outside(module: str, name: str, *, is_tensor: bool = False) -> OwnState:
    """Return the error for code between blocks that changes the state of a module."""
    at = f"model.{module}" if module else "model"
    forgotten = (
        ". Where only generation reads it, not training, let the class forget it: "
        f"type({at}).{name} = property(lambda self: None, lambda self, value: None)"
    )
    where = f"the forward of '{module}'" if module else "the forward of the model itself"
    return OwnState(
        f"{where} changes its '{name}', and it is no block: every stage would do so, for each "
        "micro-batch, in its own time. Keep it in a local variable, or put it into an nn.Module "
        f"with parameters{forgotten if is_tensor else ''}",
        module if name.isidentifier() else "",  # others are class attributes, or globals
        name,
    )


def is_kept_by_one(model: nn.Module, path: str, name: str) -> bool:
    """Tell whether no module elsewhere refers to the content of a module's attribute."""
    module = model.get_submodule(path)
    inside = {id(part) for part in module.modules()}
    own = {id(holder) for holder, _ in holders([getattr(module, name, None)])}
    others = (vars(m) for m in model.modules() if id(m) not in inside)
    return not any(id(holder) in own for holder, _ in holders([*others]))


_PATCHING = threading.RLock()
"""Held while functions of torch are replaced, which all threads see."""
_SEEDING = (
    (torch, ("manual_seed", "seed", "set_rng_state")),
    (torch.random, ("manual_seed", "seed", "set_rng_state", "fork_rng")),
    (torch.cuda, ("manual_seed", "manual_seed_all", "set_rng_state", "set_rng_state_all")),
)
"""The functions that set torch's random state, by the module or class that has them."""
_LIBRARIES = ("torch", "penstock")
"""Packages that may set it."""
_SAVING_MODES = ("torch.autograd", "torch.utils", "torch._", "penstock")
"""Modules that ask for the gradient mode only to restore it later."""


class Writes:
    """The attributes that are written in a recording.

    A write of an equal number counts too: with other inputs it may be another number.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._inside = {id(part) for block in blocks.values() for part in block.modules()}
        self._by: dict[tuple[int, str], set[EventKey | None]] = {}

    @contextmanager
    def noted(self, recording: Recording) -> Iterator[None]:
        """Record all writes of the pass to modules of the model."""
        native = nn.Module.__setattr__

        def write(module: nn.Module, name: str, value: Any) -> None:
            if CURRENT.get() is recording and not _is_harmless(module, name, value):
                self._by.setdefault((id(module), name), set()).add(recording.running())
            native(module, name, value)

        with _PATCHING, _replaced(nn.Module, "__setattr__", write):
            yield

    def check(
        self, together: Collection[Collection[str]], settings: Collection[Slot] = ()
    ) -> None:
        """Raise CutError for writes of several stages if one may read another's.

        `settings` are made once and may be written.
        """
        allowed = {(id(setting.holder), setting.key) for setting in settings}
        for (module, name), calls in self._by.items():
            path = self._paths.get(module)
            if path is None or (module, name) in allowed:  # None: made by the forward
                continue
            writers = [call for call in calls if call is not None]
            if module not in self._inside:
                raise changed_outside(path, name)
            if len(writers) < len(calls):
                raise CutError(
                    f"the code between blocks changes the {name!r} of '{path}': every stage would "
                    "do so, for each micro-batch, in its own time. Give it to the block as an "
                    "argument"
                )
            blocks = sorted({call.block for call in writers})
            if len(writers) > 1 and not any(set(blocks) <= set(group) for group in together):
                raise CutError(
                    f"{len(writers)} calls of blocks ({', '.join(blocks)}) write {name!r} of "
                    f"'{path}': on stages of their own they would read what another one has "
                    "written. Keep it in a local variable, or keep the calls on one stage: "
                    f"together={blocks}"
                )


def _is_harmless(module: nn.Module, name: str, value: Any) -> bool:
    if name == "training" or name in UNCOUNTED:
        return True
    if hasattr(getattr(type(module), name, None), "__set__"):  # its own writes are recorded
        return True
    kept = (vars(module), parameters_of(module), buffers_of(module), children_of(module))
    old = next((names[name] for names in kept if name in names), ABSENT)
    if value is True:  # a flag is set once
        return old is ABSENT or old is True
    return old is value and (value is None or isinstance(value, Tensor | nn.Module))


@contextmanager
def seeds_refused() -> Iterator[None]:
    """Raise CutError if the model sets torch's random state; torch's checkpoints may set it."""

    def refusing(native: Callable[..., Any]) -> Callable[..., Any]:
        def seed(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if CURRENT.get() is not None and caller.partition(".")[0] not in _LIBRARIES:
                raise CutError(
                    f"the model calls torch's {native.__name__} ({calling_line()}), and Penstock "
                    "gives each call of a block its own random numbers, whatever the cut. Draw "
                    "with a torch.Generator of your own inside a block, or leave the seed to "
                    "seed= of the pipeline"
                )
            return native(*args, **kwargs)

        return seed

    with _PATCHING, ExitStack() as after:
        for owner, name in ((owner, name) for owner, names in _SEEDING for name in names):
            after.enter_context(_replaced(owner, name, refusing(getattr(owner, name))))
        yield


@contextmanager
def grad_mode_noted() -> Iterator[None]:
    """Record that the code between blocks asks for the gradient mode."""
    native = torch.is_grad_enabled

    def is_grad_enabled() -> bool:
        current = CURRENT.get()
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if current is not None and not current.is_inside and not caller.startswith(_SAVING_MODES):
            current.asks_for_grad = True
        return native()

    with _PATCHING, _replaced(torch, "is_grad_enabled", is_grad_enabled):
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    native = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, native)
