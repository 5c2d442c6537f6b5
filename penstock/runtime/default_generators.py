"""See that nothing draws from torch's default generators, which all threads share, in a run."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Generator, Tensor

from penstock.errors import RandomnessError, RecomputeError

from .devices import with_index

default_generators_lock: ContextVar[threading.Lock] = ContextVar(
    "default_generators_lock",
    default=threading.Lock(),  # noqa: B039 - one lock for all is what is wanted
)
"""Held by whoever has put a state of its own into torch's default generators.

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


@contextmanager
def guarded_default_generators(devices: Iterable[torch.device]) -> Iterator[None]:
    """Check that nothing drew from a default generator inside.

    Raises:
        RandomnessError: something did; the step's masks would depend on the number of stages.
    """
    generators = generators_for(devices)
    before = _states(generators)
    differing: RecomputeError | None = None
    try:
        yield
    except RecomputeError as error:  # most likely because of a draw, which is what to tell
        differing = error
    with default_generators_lock.get():
        moved = have_moved(generators, before)
    if moved:
        raise RandomnessError(
            "a layer drew random numbers outside its own stream: it did not draw, or not there, "
            "when it first ran in this mode, or it draws in its backward. The gradients of this "
            "step must not be used: zero them. Layers are looked at again in the next step. If it "
            "was another thread of this process (one that prepares data, say), give that thread a "
            "torch.Generator of its own"
        ) from differing
    if differing is not None:
        raise differing


@contextmanager
def rewound_default_generators(devices: Iterable[torch.device]) -> Iterator[None]:
    """Put the default generators back if a RandomnessError ends what runs inside."""
    generators = generators_for(devices)
    before = _states(generators)
    try:
        yield
    except RandomnessError:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        raise


def _states(generators: Iterable[Generator]) -> list[Tensor]:
    with default_generators_lock.get():
        return [generator.get_state() for generator in generators]
