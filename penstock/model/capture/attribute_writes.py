"""What a model's forward writes while it is recorded, and stages would write in their own time."""

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CutError
from penstock.model.kept import UNCOUNTED
from penstock.torch_private import buffers_of, children_of, parameters_of

from .errors import calling_line
from .events import EventKey
from .ghost import CURRENT
from .outer_state import Slot, changed_outside
from .recording import Recording

_ABSENT = object()
_PATCHING = threading.RLock()
_SEEDING = (
    (torch, ("manual_seed", "seed", "set_rng_state")),
    (torch.random, ("manual_seed", "seed", "set_rng_state", "fork_rng")),
    (torch.cuda, ("manual_seed", "manual_seed_all", "set_rng_state", "set_rng_state_all")),
)
_LIBRARIES = ("torch", "penstock")
_SAVING_MODES = ("torch.autograd", "torch.utils", "torch._", "penstock")
"""Modules that ask for the mode of gradients to put it back later."""


class Writes:
    """The attributes that are written in a recording.

    One that is written with what it holds already is noted too, if that is a number: it may be
    another one with other inputs.
    """

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._inside = {id(part) for block in blocks.values() for part in block.modules()}
        self._by: dict[tuple[int, str], set[EventKey | None]] = {}

    @contextmanager
    def noted(self, recording: Recording) -> Iterator[None]:
        """Note all writes to modules of the model by the pass."""
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
        """Refuse writes that several stages may do, where one reads what another has written.

        `settings` are made once and for all, and may be written.

        Raises:
            CutError: names the attribute.
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
    if hasattr(getattr(type(module), name, None), "__set__"):  # what it writes is noted
        return True
    kept = (vars(module), parameters_of(module), buffers_of(module), children_of(module))
    old = next((names[name] for names in kept if name in names), _ABSENT)
    if value is True:  # a flag, set once and for all
        return old is _ABSENT or old is True
    return old is value and (value is None or isinstance(value, Tensor | nn.Module))


@contextmanager
def seeds_refused() -> Iterator[None]:
    """Refuse that a model sets torch's random state: Penstock sets it for each call.

    Raises:
        CutError: it does; torch's own code may, as checkpoints do.
    """
    with _PATCHING, ExitStack() as after:
        for owner, name in ((owner, name) for owner, names in _SEEDING for name in names):
            after.enter_context(_replaced(owner, name, _refusing(getattr(owner, name))))
        yield


@contextmanager
def grad_mode_noted() -> Iterator[None]:
    """Note that the code between blocks asks whether gradients are recorded."""
    native = torch.is_grad_enabled

    def is_grad_enabled() -> bool:
        current = CURRENT.get()
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if current is not None and not current.is_inside and not caller.startswith(_SAVING_MODES):
            current.asks_for_grad = True
        return native()

    with _PATCHING, _replaced(torch, "is_grad_enabled", is_grad_enabled):
        yield


def _refusing(native: Callable[..., Any]) -> Callable[..., Any]:
    def seed(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if CURRENT.get() is not None and caller.partition(".")[0] not in _LIBRARIES:
            raise CutError(
                f"the model calls torch's {native.__name__} ({calling_line()}), and Penstock "
                "gives each call of a block its own random numbers, whatever the cut. Draw with a "
                "torch.Generator of your own inside a block, or leave the seed to seed= of the "
                "pipeline"
            )
        return native(*args, **kwargs)

    return seed


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    native = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, native)
