"""Torch's default generators, which all threads share: lend them out, and see that none moved."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

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


def runs_and_draws(
    key: int, function: Callable[[], Any], device: torch.device
) -> tuple[Any, bool]:
    """Run `function` with torch's default generators seeded with `key`; tell whether it drew.

    Gives the same numbers as under `KeyedRandomness`, and leaves every kernel its own choice of
    path; but only one thread at a time may do so.  A checkpoint of the user's own keeps the state
    of these generators, and so draws the same numbers in the backward pass.
    """
    with alone_with_generators(device) as generators:
        seeded = [g.manual_seed(key).get_state() for g in generators]
        result = function()
        after = [g.get_state() for g in generators]
    return result, any(not torch.equal(s, a) for s, a in zip(seeded, after, strict=True))


@contextmanager
def alone_with_generators(device: torch.device) -> Iterator[list[Generator]]:
    """Have torch's default generators to oneself, and put them back.

    A backward pass needs them so where checkpoints may run again: each brings the generators to
    the state of its forward meanwhile.
    """
    generators = generators_for(device)
    with default_generators_lock.get(), _lock_of_its_own():
        before = [(generator, generator.get_state()) for generator in generators]
        try:
            yield generators
        finally:
            for generator, state in before:
                generator.set_state(state)


@contextmanager
def checked_draws(device: torch.device) -> Iterator[None]:
    """Let checkpoints of the user's own draw again what they drew: they set the generators back.

    Raises:
        RandomnessError: something drew that did not.
    """
    generators = generators_for(device)
    before = [generator.get_state() for generator in generators]
    yield
    if any(not torch.equal(g.get_state(), s) for g, s in zip(generators, before, strict=True)):
        raise drew_in_backward("a layer")


@contextmanager
def _lock_of_its_own() -> Iterator[None]:
    token = default_generators_lock.set(threading.Lock())
    try:
        yield
    finally:
        default_generators_lock.reset(token)


def drew_in_backward(who: str) -> RandomnessError:
    return RandomnessError(
        f"{who} drew random numbers during the backward pass that are not those of its forward: "
        "it runs again there, in a torch.utils.checkpoint that was switched on after its first "
        "steps, or keeps no random state (preserve_rng_state=False), or in a checkpoint written "
        "by hand; or the backward of an operator of your own draws, which has no numbers of its "
        "own to draw: draw them in its forward. The gradients of this step must not be used: zero "
        "them. A checkpoint that was switched on is known from the next step; for other "
        "checkpoints, use recompute=Recompute.STAGE"
    )


def default_generator(device: torch.device) -> Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[with_index(device).index]
    return torch.default_generator


def generators_for(device: torch.device) -> list[Generator]:
    """Return the default generators that a layer on `device` may draw from."""
    return list(dict.fromkeys(map(default_generator, (torch.device("cpu"), device))))


@contextmanager
def guarded_default_generators(devices: Iterable[torch.device]) -> Iterator[None]:
    """Check that nothing drew from a default generator inside.

    Raises:
        RandomnessError: something did; the step's masks would depend on the number of stages.
    """
    generators = [default_generator(d) for d in dict.fromkeys((torch.device("cpu"), *devices))]
    before = _states(generators)
    differing: RecomputeError | None = None
    try:
        yield
    except RecomputeError as error:  # most likely because of a draw, which is what to tell
        differing = error
    if any(not torch.equal(now, s) for now, s in zip(_states(generators), before, strict=True)):
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
    generators = [default_generator(d) for d in dict.fromkeys((torch.device("cpu"), *devices))]
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
