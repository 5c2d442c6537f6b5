"""Share the calling thread's modes with worker threads, and guard its random generators.

Threads do not inherit torch's modes, so workers enter the caller's.  All threads share torch's
default generators and the outside ones, Python's `random` and `numpy.random`.  A step must leave
these alone; `guarded_default_generators` checks that.
"""

import ctypes
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy
import torch
from torch import Generator, Tensor
from torch.autograd.graph import disable_saved_tensors_hooks

from penstock.errors import ConfigError, ExecutionWarning, RandomnessError, RecomputeError
from penstock.torch_private import (
    COMPILER,
    COMPILER_LOCK,
    cached_weights,
    disabled_hooks,
    dispatch_modes,
    function_modes,
    is_default_device,
    is_profiled,
    saving_hooks,
    without_cached_weights,
)

from .devices import with_index

_around: ContextVar[tuple[str, ...] | None] = ContextVar("modes_around", default=None)
"""Names of the modes that bind the surrounding pipeline to its calling thread; None outside."""


@dataclass(frozen=True, slots=True)
class _Autocast:
    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool


@dataclass(frozen=True, slots=True)
class CallerContext:
    """Grad mode, inference mode, autocast, default device, denormal numbers and context variables.

    `hooks_disabled` is the message of `disable_saved_tensors_hooks`; None if it was not entered.
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
        """Read the calling thread's modes; the run sets its own grad mode.

        A ConfigError refuses cached parametrized weights while gradients are recorded.
        """
        if with_grad and cached_weights.depth:
            raise ConfigError(
                "the pipeline was called with gradients inside parametrize.cached(): a weight "
                "cached there would have one graph for all micro-batches and stages, which run in "
                "threads of their own. Leave that block, and enter it in the forward of the layer "
                "that reads a weight several times"
            )
        caches = torch.is_autocast_cache_enabled()
        autocasts = [
            _Autocast(
                kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), caches
            )
            for kind in sorted({device.type for device in devices})
        ]
        # A copy of the context variables: workers must not change the caller's.
        return cls(
            with_grad=with_grad,
            inference=torch.is_inference_mode_enabled() and not with_grad,
            autocasts=tuple(autocasts),
            device=_default_device(),
            flushes=_flushes(),
            hooks_disabled=disabled_hooks(),
            variables=copy_context(),
            bound=_bound_modes(),
        )

    @property
    def casts(self) -> bool:
        """True if autocast is on for a device of the run."""
        return any(mode.enabled for mode in self.autocasts)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter the captured modes in this thread; leave them in reverse order."""
        # Enter only what differs: each mode costs time at every job.
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
                    autocast = torch.autocast(
                        mode.device_type, mode.dtype, mode.enabled, mode.cache
                    )
                    stack.enter_context(autocast)
            yield

    def check_hooks(self, what_for: str) -> None:
        """Raise ConfigError if saved_tensors_hooks are disabled, and needed by `what_for`."""
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
    """Name the modes that apply to this thread alone, or around the pipeline that calls us."""
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
    """Return the default device that the user set, or None."""
    return torch.get_default_device() if any(map(is_default_device, function_modes())) else None


def _flushes(half: float = 0.5) -> bool:
    """Tell whether this thread rounds denormal numbers to 0 (`torch.set_flush_denormal`)."""
    return sys.float_info.min * half == 0


@contextmanager
def fresh_casts() -> Iterator[None]:
    """Clear torch's autocast cache before and after a run, unless another pipeline calls it.

    The caller's autocast caches casts until it ends, even of weights that an optimizer has moved.
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
    """Keep torch's autocast cache while inner autocasts end: all threads share that cache."""
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()


# -- generators ------------------------------------------------------------------------------


class GeneratorsLock:
    """The lock of the generators that all threads share, held while one changes their state.

    torch.compile puts the default generators back when it has compiled, in any thread: it waits.
    """

    _compilers: ClassVar = threading.local()
    """`stack`: for each lock that this thread holds, torch's lock or None."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()  # first: code that torch compiles never waits for it
        compiler = getattr(sys.modules.get(COMPILER), COMPILER_LOCK, None)
        if compiler is not None:
            compiler.acquire()
        vars(self._compilers).setdefault("stack", []).append(compiler)

    def __exit__(self, *_: object) -> None:
        compiler = self._compilers.stack.pop()
        if compiler is not None:
            compiler.release()
        self._lock.release()

    @classmethod
    @contextmanager
    def letting_compile(cls) -> Iterator[None]:
        """Let other threads compile meanwhile: the workers of a pipeline inside a layer."""
        held = [c for c in getattr(cls._compilers, "stack", ()) if c is not None]
        for compiler in held:
            compiler.release()
        try:
            yield
        finally:
            for compiler in held:
                compiler.acquire()


default_generators_lock: ContextVar[GeneratorsLock] = ContextVar(
    "default_generators_lock",
    default=GeneratorsLock(),  # noqa: B039 - one lock for all is what is wanted
)
"""The lock in force; a pipeline inside a layer that holds it finds a fresh one in its context."""

NUMPYS: Any = numpy.random
"""The module `numpy.random`, without types: its stub leaves functions out."""

_MT19937_BYTES = 4 * 625
"""Bytes of a Mersenne Twister's state: 624 words, and the position in them."""

_UNCLEAR = (
    "Python's or NumPy's global generator drew random numbers in a step, outside the streams of "
    "the layers. If another thread of this process drew them (one that prepares data, say), all "
    "is well; random.Random() or numpy.random.default_rng() in that thread ends this warning. If "
    "it was a layer that did not draw when it first ran in this mode, the gradients of this step "
    "are wrong; layers are looked at again in the next one"
)


def default_generator(device: torch.device) -> Generator:
    """Return torch's default generator of a device."""
    if device.type == "cuda":
        return torch.cuda.default_generators[with_index(device).index]
    return torch.default_generator


def generators_for(devices: Iterable[torch.device]) -> list[Generator]:
    """Return the default generators that layers on these devices may draw from."""
    return list(dict.fromkeys(map(default_generator, (torch.device("cpu"), *devices))))


def have_moved(generators: Iterable[Generator], before: Iterable[Tensor]) -> bool:
    """Tell whether the state of a generator has changed."""
    pairs = zip(generators, before, strict=True)
    return any(not torch.equal(g.get_state(), state) for g, state in pairs)


def outside_states() -> tuple[Any, bytes | str]:
    """Return the states of Python's and NumPy's global generators, to compare."""
    bits = NUMPYS.get_bit_generator()
    if isinstance(bits, numpy.random.MT19937):  # its words and its place in them: 60 times faster
        return random.getstate(), ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)
    return random.getstate(), str(bits.state)


def generator_states(
    generators: Iterable[Generator],
) -> tuple[list[Tensor], tuple[Any, bytes | str]]:
    """Return the states of torch's default generators and of the outside ones, to compare."""
    with default_generators_lock.get():
        return [generator.get_state() for generator in generators], outside_states()


def others_may_draw() -> bool:
    """Tell whether this process has threads, other than Penstock's workers, that may draw."""
    current = threading.current_thread()
    others = [t for t in threading.enumerate() if t is not current]
    return any(not t.name.startswith("penstock-rank-") for t in others)


@contextmanager
def guarded_default_generators(
    devices: Iterable[torch.device], look_again: Callable[[BaseException], None]
) -> Iterator[None]:
    """Raise RandomnessError if code inside draws from a default or outside generator.

    If an outside one moved and other threads may have drawn, warn and call `look_again`: a layer
    that drew will use its stream in the next step.
    """
    # 1. Note the states, and run.
    generators = generators_for(devices)
    before, outside = generator_states(generators)
    differing: RecomputeError | None = None
    try:
        with GeneratorsLock.letting_compile():
            yield
    except RecomputeError as error:  # a draw is the likely cause: report that if there was one
        differing = error
    # 2. Compare.  Other threads draw from the outside generators too, so these prove less.
    with default_generators_lock.get():
        moved = have_moved(generators, before)
        moved_outside = outside_states() != outside
    if moved_outside and not moved and differing is None and others_may_draw():
        look_again(RandomnessError(_UNCLEAR))
        warnings.warn(_UNCLEAR, stacklevel=2)
    elif moved or moved_outside:
        raise RandomnessError(
            "a layer drew random numbers outside its own stream: it did not draw, or not there, "
            "when it first ran in this mode, or it draws in its backward. The gradients of this "
            "step must not be used: zero them. Layers are looked at again in the next step. If it "
            "was another thread of this process (one that prepares data, say), give that thread a "
            "generator of its own (torch.Generator, random.Random, numpy.random.default_rng)"
        ) from differing
    if differing is not None:
        raise differing
