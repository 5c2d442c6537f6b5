"""Give each layer its own random stream; learn how it draws, so that other layers pay nothing."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache, partial
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from penstock.errors import RandomnessError
from penstock.runtime.run import Run
from penstock.runtime.stage.guards import RerunGuard
from penstock.runtime.stage.tape import Tape
from penstock.torch_private import COMPILED_CALLS, AnyDropout

from .streams import (
    KeyedRandomness,
    RefuseDraws,
    WatchDraws,
    alone_with_generators,
    checked_draws,
    refuse_outside_draws,
    runs_and_draws,
)

_RERUNS = frozenset(("torch.random", "torch.utils.checkpoint"))


class CompiledCalls:
    """Runs functions, and notes whether compiled code ran inside.

    Under a dispatch mode torch runs compiled functions uncompiled.  So a layer with compiled code
    must be known before a mode is entered.  The code may be anywhere (a module, a module inside
    it, a function that a forward calls), but all of it starts in one module of torch.

    `reruns`: a checkpoint ran too, or code read or set the default generators' state, so the
    backward may draw again.
    """

    def __init__(self) -> None:
        self.seen = False
        self.reruns = False

    def look(self, function: Callable[[], Any], *, only_first: bool = False) -> Any:
        """Run `function`; with `only_first`, stop looking at the first compiled call.

        Compilation inside that call then takes no longer.  If Python's profiler is in use, this
        sees nothing.
        """
        if sys.getprofile() is not None:
            return function()

        def note(frame: FrameType, event: str, _: Any) -> None:
            name = frame.f_globals.get("__name__") if event == "call" else None
            if name == COMPILED_CALLS:
                self.seen = True
                if only_first:
                    sys.setprofile(None)
            elif name in _RERUNS:
                self.reruns = True

        sys.setprofile(note)
        try:
            return function()
        finally:
            sys.setprofile(None)


class Draws(Enum):
    """The known facts of how a layer draws random numbers."""

    NEVER = auto()
    """The layer does not draw."""
    SOMEHOW = auto()
    """The layer draws; it is not known yet how."""
    IN_COMPILED = auto()
    """The layer draws and runs compiled code; its backward may draw again."""
    IN_OPERATORS = auto()
    """Torch's random operators draw, anywhere in the layer."""
    IN_DROPOUTS = auto()
    """Only plain dropout modules inside the layer draw."""
    ALONE = auto()
    """The layer needs the shared generators alone, and has no checkpoint.

    Compiled code draws, which a dispatch mode would switch off; or a `torch.library.custom_op`
    does; or the layer draws from Python's `random` or from `numpy.random`."""
    SEEDED = auto()
    """The layer needs torch's default generators seeded.

    The user's own operator draws; or a checkpoint does, which will draw again in the backward; or
    the layer draws outside torch and has a checkpoint, which must not."""


@dataclass(slots=True)
class LayerCall:
    """One call of one layer, or of the loss, on one micro-batch."""

    run: Run
    tape: Tape
    layer: int
    training: bool

    @property
    def key(self) -> int:
        return self.run.streams.key(self.layer, self.tape.microbatch)

    @property
    def may_seed(self) -> bool:
        """True if nobody else needs torch's default generators meanwhile."""
        return self.run.is_alone and self.run.generators is None

    def note_seeded(self) -> None:
        """Note that the call runs with torch's default generators seeded."""
        if self.run.generators is not None:
            self.run.generators.seed_default(self.layer)

    @property
    def make(self) -> Callable[[torch.device], Generator] | None:
        """Makes the call's generator, if the run has its own way."""
        run = self.run
        if run.generators is None:
            return None
        return partial(run.generators.make, run.streams, self.layer, self.tape.microbatch)


class Drawing(RerunGuard):
    """Runs the layers of a stage, each with its own random stream if it draws.

        first call     alone, from the default generators: does it draw, does it run compiled code?
        second call    the same, and watched: where does it draw?
        later calls    from the layer's own generator, if all its draws can take one

    A fact holds for a layer's mode and dropout probabilities: a schedule may raise one from 0.
    `silent` has the (layer, training) that draw nothing and hold no dropout: stages call these
    directly.
    """

    def __init__(self, layers: Iterable[tuple[int, nn.Module]], device: torch.device) -> None:
        self._device = device
        self.silent: set[tuple[int, bool]] = set()
        self._known: dict[tuple[float, ...], Draws] = {}
        self._own_generators = set()
        self._dropouts: dict[int, list[Any]] = {}
        self._elsewhere_too = False
        self._outside: set[tuple[float, ...]] = set()
        for index, module in layers:
            self._dropouts[index] = [m for m in module.modules() if isinstance(m, AnyDropout)]
            if any(isinstance(v, Generator) for m in module.modules() for v in vars(m).values()):
                self._own_generators.add(index)

    def forget(self, error: BaseException) -> None:
        """Look at every layer again before trusting that it draws no random numbers."""
        self.silent.clear()
        self._known = {key: how for key, how in self._known.items() if how in _LASTING}
        self._elsewhere_too |= isinstance(error, RandomnessError)

    def run(self, call: LayerCall, function: Callable[[], Any]) -> Any:
        """Run `function`, the layer's call; note in the tape if its backward may draw again."""
        layer, training = call.layer, call.training
        key = (layer, training, *(m.p for m in self._dropouts.get(layer, ())))
        known = self._known.get(key)
        if known is Draws.NEVER or (known is None and not training and call.run.trusts_evaluation):
            return function()
        # A layer whose draws are not known to be torch's operators runs alone, from seeded
        # default generators; all others run beside other threads.  Without other threads, seeding
        # is the cheaper way: a dispatch mode runs Python at every operator.
        has_own = layer in self._own_generators
        in_operators = has_own or (known is Draws.IN_OPERATORS and not call.may_seed)
        if not in_operators and known is not Draws.IN_DROPOUTS:
            call.note_seeded()
            return self._run_seeded(key, call, function)
        tape = call.tape
        repeatable = tape.graph_dropped or layer in tape.dropped_layers
        stream = KeyedRandomness(call.key, repeatable=repeatable, make=call.make)
        if in_operators:
            with stream:
                result = function()
        else:
            result = with_keyed_dropouts(self._dropouts[layer], stream, function)
        if stream.drew_in_checkpoint:  # the user switched a checkpoint on since
            self._known[key] = Draws.SEEDED
            tape.reruns_in_backward = tape.must_not_draw = True
        return result

    def _run_seeded(
        self, key: tuple[float, ...], call: LayerCall, function: Callable[[], Any]
    ) -> Any:
        """Run a layer alone, from seeded default generators, and learn more of it each time."""
        # 1. Choose the watch for this call: each costs time, so one fact is learned per call.
        known, compiled = self._known.get(key), CompiledCalls()
        watch = WatchDraws(self._device, filter(is_plain, self._dropouts.get(call.layer, ())))
        run = function
        match known:
            case None:
                run = partial(compiled.look, function, only_first=True)
            case Draws.SOMEHOW:
                run = partial(watch.run, function)
            case Draws.IN_COMPILED:
                run = partial(compiled.look, function)

        # 2. Run with seeded generators, and see whether they moved.
        call.run.has_seeded |= known not in (Draws.ALONE, Draws.IN_OPERATORS)
        outside = self._elsewhere_too or key in self._outside or known in _LEARNING
        result, drew, drew_outside = runs_and_draws(call.key, run, self._device, outside=outside)
        if drew_outside:
            self._outside.add(key)

        # 3. Keep the facts for the next call.
        drew = drew or drew_outside
        if known is None and not drew:
            self._known[key] = Draws.NEVER
            if not self._dropouts.get(call.layer):
                self.silent.add((call.layer, call.training))
        elif drew:
            self._known[key] = self._seen(key, compiled, watch)
        call.tape.draws_again |= drew and self._known[key] in _MAY_DRAW_AGAIN
        return result

    @contextmanager
    def around_rerun(self, run: Run, tape: Tape) -> Iterator[None]:
        """Let layers that run again in a backward repeat their draws, or refuse draws."""
        with ExitStack() as context:
            if run.has_seeded or self._outside:
                context.enter_context(alone_with_generators(self._device))
            if self._outside:
                context.enter_context(refuse_outside_draws())
            if tape.may_rerun:
                repeats = tape.draws_again and not tape.must_not_draw
                refusing: Any = RefuseDraws  # torch leaves it untyped
                context.enter_context(checked_draws(self._device) if repeats else refusing())
            yield

    def _seen(self, key: tuple[float, ...], compiled: CompiledCalls, watch: WatchDraws) -> Draws:
        """Return the facts of a layer after another watched call that drew."""
        known = self._known.get(key)
        if known is None:
            return Draws.IN_COMPILED if compiled.seen else Draws.SOMEHOW
        if known is Draws.IN_COMPILED:
            return Draws.SEEDED if compiled.reruns else Draws.ALONE
        if known is not Draws.SOMEHOW:
            return known
        if key in self._outside:
            return Draws.SEEDED if watch.has_checkpoint or watch.unseen else Draws.ALONE
        if watch.in_checkpoint or watch.unseen:
            return Draws.SEEDED
        if watch.outside or self._elsewhere_too:
            return Draws.IN_OPERATORS
        return Draws.IN_DROPOUTS


_LEARNING = (None, Draws.SOMEHOW, Draws.IN_COMPILED)
_LASTING = (Draws.SEEDED, Draws.ALONE)
_MAY_DRAW_AGAIN = (Draws.SOMEHOW, Draws.IN_COMPILED, Draws.SEEDED)


_lock = threading.Lock()
_users: dict[nn.Dropout, int] = {}
_current = threading.local()


# -- plain dropout modules ---------------------------------------------------------------------
#
# A dispatch mode runs Python at every operator of a layer.  If only plain `nn.Dropout` modules
# draw in a layer, their forwards are replaced instead: they make the noise from the stream's
# generator as torch's dropout makes it from the default one.


def is_plain(module: nn.Module) -> bool:
    """Tell whether a module is torch's own dropout, with torch's own forward."""
    return type(module) is nn.Dropout and (
        "forward" not in vars(module) or module in _users  # another thread's call replaced it
    )


def with_keyed_dropouts(
    modules: Iterable[nn.Module], stream: KeyedRandomness, function: Callable[[], Any]
) -> Any:
    """Run `function`, and let the plain dropout modules that it calls draw from `stream`.

    Other stages may call the same modules in their threads, each with its own stream.
    """
    outer = getattr(_current, "stream", None)
    _current.stream = stream
    with _lock:  # the first of several threads replaces a forward, the last one restores it
        replaced: list[Any] = [m for m in modules if m in _users or is_plain(m)]
        for module in replaced:
            if module not in _users:
                module.__dict__["forward"] = partial(_forward, module)
            _users[module] = _users.get(module, 0) + 1
    try:
        return function()
    finally:
        _current.stream = outer
        _put_back(replaced)


def _put_back(replaced: Iterable[Any]) -> None:
    with _lock:
        for module in replaced:
            _users[module] -= 1
            if not _users[module]:
                del _users[module], module.__dict__["forward"]


def _forward(module: nn.Dropout, x: Tensor) -> Tensor:
    stream: KeyedRandomness | None = getattr(_current, "stream", None)
    if stream is None or not module.training or not 0 < module.p < 1:
        return nn.Dropout.forward(module, x)
    stream.note_checkpoint()
    if type(x) is not Tensor or x.device.type != "cpu" or not x.numel() or not _is_torchs(x.dtype):
        with stream:
            return nn.Dropout.forward(module, x)
    return dropout(x, module.p, stream.generator(x.device), inplace=module.inplace)


def dropout(x: Tensor, p: float, generator: Generator, *, inplace: bool = False) -> Tensor:
    """Compute torch's dropout on the CPU, with its noise from `generator`."""
    noise = torch.empty_like(x)
    noise.bernoulli_(1 - p, generator=generator).div_(1 - p)
    return x.mul_(noise) if inplace else x * noise


@cache
def _is_torchs(dtype: torch.dtype) -> bool:
    """Compare `dropout` with torch's, once per dtype: other versions may make noise otherwise."""
    with torch.no_grad():
        x = torch.linspace(-2, 2, 57).to(dtype)
        cpu = torch.device("cpu")
        torchs, *_ = runs_and_draws(3, partial(F.dropout, x, 0.3), cpu)
        return torch.equal(torchs, dropout(x, 0.3, Generator().manual_seed(3)))
