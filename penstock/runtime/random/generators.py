"""Seed the generators that all threads share for a while, and restore their states."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import numpy
import torch

from penstock.errors import RandomnessError
from penstock.runtime.caller import (
    NUMPYS,
    default_generators_lock,
    generator_states,
    generators_for,
)


def seed_outside(key: int) -> None:
    """Seed Python's and NumPy's global generators."""
    random.seed(key)
    bits = NUMPYS.get_bit_generator()
    if isinstance(bits, numpy.random.MT19937):
        numpy.random.seed([key % 2**32, key >> 32])
    else:
        NUMPYS.set_state(type(bits)(key).state)


@contextmanager
def kept_outside() -> Iterator[None]:
    """Restore Python's and NumPy's global generators; the caller alone may draw inside."""
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
    """The stream that code between layers draws from Python's and NumPy's global generators.

    The caller holds their lock inside, except in `run_layer`.
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
        """Run one layer, which has its own stream, without the lock."""
        self.__exit__()
        try:
            return perform(*args)
        finally:
            self.__enter__()


@contextmanager
def rewound_default_generators(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the default generators if a RandomnessError is raised inside."""
    generators = generators_for(devices)
    before, _ = generator_states(generators)
    outside = _get_outside()
    try:
        yield
    except RandomnessError:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        _set_outside(outside)
        raise
