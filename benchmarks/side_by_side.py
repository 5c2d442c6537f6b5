"""Runs that do not need each other, one on each core."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

import torch

_Case = TypeVar("_Case")
_Found = TypeVar("_Found")


def side_by_side(
    measure: Callable[[_Case], _Found], cases: Sequence[_Case], num_jobs: int
) -> list[_Found]:
    """Give what `measure` finds of each case, in order; a job is a process with one thread.

    One job is this process.
    """
    torch.set_num_threads(1)
    if num_jobs == 1:
        return [measure(case) for case in cases]
    with ProcessPoolExecutor(
        num_jobs, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        return list(pool.map(measure, cases))
