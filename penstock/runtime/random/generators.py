"""See that nothing draws from generators that all threads share in a run: torch's default ones,
and those of Python's `random` and `numpy.random`, the outside ones.
"""

import ctypes
import random
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Self

import numpy
import torch
from torch import Generator, Tensor

from penstock.errors import RandomnessError, RecomputeError
from penstock.runtime.devices import with_index

default_generators_lock: ContextVar[threading.Lock] = ContextVar(
    "default_generators_lock",
    default=threading.Lock(),  # noqa: B039 - one lock for all is what is wanted
)
"""Held by whoever has put a state of its own into the generators that all threads share.

What runs inside a layer that holds it (another pipeline) finds a fresh one in its context.
"""

_numpys: Any = numpy.random  # its stub leaves functions out


def default_generator(device: torch.device) -> Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[with_index(device).index]
    return torch.default_generator


def generators_for(devices: Iterable[torch.device]) -> list[Generator]:
    """Return the default generators that layers on these devices may draw from."""
    return list(dict.fromkeys(map(default_generator, (torch.device("cpu"), *devices))))


def have_moved(generators: Iterable[Generator], before: Iterable[Tensor]) -> bool:
    """Tell whether a generator is not in the state that it was in before."""
    pairs = zip(generators, before, strict=True)
    return any(not torch.equal(g.get_state(), state) for g, state in pairs)


def outside_states() -> tuple[Any, bytes | str]:
    """Return what changes when Python's or NumPy's global generator draws, to compare."""
    bits = _numpys.get_bit_generator()
    if isinstance(bits, numpy.random.MT19937):  # its words and its place in them: 60 times faster
        return random.getstate(), ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)
    return random.getstate(), str(bits.state)


def seed_outside(key: int) -> None:
    """Seed Python's and NumPy's global generators."""
    random.seed(key)
    bits = _numpys.get_bit_generator()
    if isinstance(bits, numpy.random.MT19937):
        numpy.random.seed([key % 2**32, key >> 32])
    else:
        _numpys.set_state(type(bits)(key).state)


@contextmanager
def kept_outside() -> Iterator[None]:
    """Put Python's and NumPy's global generators back; the caller alone may draw inside."""
    state = _get_outside()
    try:
        yield
    finally:
        _set_outside(state)


def _get_outside() -> tuple[Any, Any]:
    return random.getstate(), numpy.random.get_state(legacy=False)


def _set_outside(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    numpy.random.set_state(state[1])


class StreamBetween:
    """The numbers that code between layers draws from Python's and NumPy's global generators.

    Inside, the caller has these to itself, but for `run_layer`.
    """

    def __init__(self, key: int) -> None:
        self._key = key
        self._state: tuple[Any, Any] | None = None
        self._lent = ExitStack()

    def __enter__(self) -> Self:
        self._lent.enter_context(default_generators_lock.get())
        self._lent.enter_context(kept_outside())
        if self._state is None:
            seed_outside(self._key)
        else:
            _set_outside(self._state)
        return self

    def __exit__(self, *_: object) -> None:
        self._state = _get_outside()
        self._lent.close()

    def run_layer(self, perform: Callable[..., Any], *args: Any) -> Any:
        """Run one layer, which has a stream of its own."""
        self.__exit__()
        try:
            return perform(*args)
        finally:
            self.__enter__()


def others_may_draw() -> bool:
    """Tell whether threads run that are not Penstock's, and may draw while a run does."""
    current = threading.current_thread()
    others = [t for t in threading.enumerate() if t is not current]
    return any(not t.name.startswith("penstock-rank-") for t in others)


@contextmanager
def guarded_default_generators(
    devices: Iterable[torch.device], look_again: Callable[[BaseException], None]
) -> Iterator[None]:
    """Check that nothing drew from a default generator inside.

    Where it was an outside one, and other threads run that may have drawn, this is a warning, and
    `look_again` is called: if it was a layer, it draws from its stream in the next step.

    Raises:
        RandomnessError: something did; the step's masks would depend on the number of stages.
    """
    generators = generators_for(devices)
    before, outside = _states(generators)
    differing: RecomputeError | None = None
    try:
        yield
    except RecomputeError as error:  # most likely because of a draw, which is what to tell
        differing = error
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


@contextmanager
def rewound_default_generators(devices: Iterable[torch.device]) -> Iterator[None]:
    """Put the default generators back if a RandomnessError ends what runs inside."""
    generators = generators_for(devices)
    before, _ = _states(generators)
    outside = _get_outside()
    try:
        yield
    except RandomnessError:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        _set_outside(outside)
        raise


def _states(generators: Iterable[Generator]) -> tuple[list[Tensor], tuple[Any, bytes | str]]:
    with default_generators_lock.get():
        return [generator.get_state() for generator in generators], outside_states()


_MT19937_BYTES = 4 * 625
_UNCLEAR = (
    "Python's or NumPy's global generator drew random numbers in a step, outside the streams of "
    "the layers. If another thread of this process drew them (one that prepares data, say), all "
    "is well; random.Random() or numpy.random.default_rng() in that thread ends this warning. If "
    "it was a layer that did not draw when it first ran in this mode, the gradients of this step "
    "are wrong; layers are looked at again in the next one"
)
