"""Lend torch's default generators, which all threads share, to one layer or backward at a time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator

from penstock.errors import RandomnessError

from .default_generators import (
    default_generators_lock,
    generators_for,
    have_moved,
    kept_outside,
    outside_states,
    seed_outside,
)


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
        return function(), have_moved(generators, seeded)


def runs_and_draws_anywhere(
    key: int, function: Callable[[], Any], device: torch.device
) -> tuple[Any, bool, bool]:
    """Do likewise with Python's and NumPy's global generators; tell also whether these drew."""
    with alone_with_generators(device) as generators, kept_outside():
        seed_outside(key)
        seeded, outside = [g.manual_seed(key).get_state() for g in generators], outside_states()
        return function(), have_moved(generators, seeded), outside_states() != outside


@contextmanager
def alone_with_generators(device: torch.device) -> Iterator[list[Generator]]:
    """Have torch's default generators to oneself, and put them back.

    A backward pass needs them so where checkpoints may run again: each brings the generators to
    the state of its forward meanwhile.
    """
    generators = generators_for([device])
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
    generators = generators_for([device])
    before = [generator.get_state() for generator in generators]
    yield
    if have_moved(generators, before):
        raise drew_in_backward("a layer")


@contextmanager
def refuse_outside_draws() -> Iterator[None]:
    """See that neither Python's nor NumPy's global generator draws inside, in a backward pass.

    Raises:
        RandomnessError: one drew.  What its forward drew is not known.
    """
    before = outside_states()
    yield
    if outside_states() != before:
        raise drew_in_backward("a layer that draws from Python's or NumPy's global generator")


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
        "own to draw: draw them in its forward. No checkpoint keeps the state of Python's random "
        "or numpy.random. The gradients of this step must not be used: zero "
        "them. A checkpoint that was switched on is known from the next step; for other "
        "checkpoints, use recompute=Recompute.STAGE"
    )
