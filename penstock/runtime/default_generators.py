"""See that nothing draws from generators that all threads share in a run: torch's default ones,
and those of Python's `random` and `numpy.random`, the outside ones.
"""

import ctypes
import random
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy
import torch
from torch import Generator, Tensor

from penstock.errors import RandomnessError, RecomputeError

from .devices import with_index

default_generators_lock: ContextVar[threading.Lock] = ContextVar(
    "default_generators_lock",
    default=threading.Lock(),  # noqa: B039 - one lock for all is what is wanted
)
"""Held by whoever has put a state of its own into the generators that all threads share.

What runs inside a layer that holds it (another pipeline) finds a fresh one in its context.
"""


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
    """Return what changes when Python's or NumPy's global generator draws, as values to compare."""
    bits = numpy.random.get_bit_generator()
    if isinstance(bits, numpy.random.MT19937):  # its words and its place in them: 60 times faster
        return random.getstate(), ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)
    return random.getstate(), str(bits.state)


def seed_outside(key: int) -> None:
    """Seed Python's and NumPy's global generators."""
    random.seed(key)
    bits = numpy.random.get_bit_generator()
    if isinstance(bits, numpy.random.MT19937):
        numpy.random.seed([key % 2**32, key >> 32])
    else:
        numpy.random.set_state(type(bits)(key).state)  # type: ignore[call-arg]


@contextmanager
def seeded_outside(key: int) -> Iterator[Callable[[], bool]]:
    """Seed Python's and NumPy's global generators inside, where the caller alone may draw.

    Gives a function that tells whether one has drawn.
    """
    pythons, numpys = random.getstate(), numpy.random.get_state(legacy=False)
    try:
        seed_outside(key)
        seeded = outside_states()
        yield lambda: outside_states() != seeded
    finally:
        random.setstate(pythons)
        numpy.random.set_state(numpys)


def others_may_draw() -> bool:
    """Tell whether threads run that are not Penstock's, and may draw while a run does."""
    current = threading.current_thread()
    others = [t for t in threading.enumerate() if t is not current]
    return any(not t.name.startswith("penstock-rank-") for t in others)


@contextmanager
def guarded_default_generators(devices: Iterable[torch.device]) -> Iterator[None]:
    """Check that nothing drew from a default generator inside.

    Where it was an outside one, and other threads run that may have drawn, this is a warning.

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
    if moved_outside and not moved and others_may_draw():
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
    before, outside = _states(generators)
    try:
        yield
    except RandomnessError:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        _put_outside(outside)
        raise


def _put_outside(states: tuple[Any, bytes | str]) -> None:
    random.setstate(states[0])
    if isinstance(states[1], bytes):
        *words, place = numpy.frombuffer(states[1], numpy.uint32)
        numpy.random.set_state(("MT19937", words, place))


def _states(generators: Iterable[Generator]) -> tuple[list[Tensor], tuple[Any, bytes | str]]:
    with default_generators_lock.get():
        return [generator.get_state() for generator in generators], outside_states()


_MT19937_BYTES = 4 * 625
_UNCLEAR = (
    "Python's or NumPy's global generator drew random numbers in a step, outside the streams of "
    "the layers. If another thread of this process drew them (one that prepares data, say), all "
    "is well; random.Random() or numpy.random.default_rng() in that thread ends this warning. If "
    "it was a layer that did not draw when it first ran in this mode, the gradients are wrong"
)
