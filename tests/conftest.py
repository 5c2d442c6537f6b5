"""Every test starts from the same seeds, on one intra-op thread, and draws the same examples."""

import gc
import os
import random
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings

from penstock.costs.measuring.measure import Repeats
from penstock.runtime import planning

torch.set_num_threads(1)
# Laws hold for any cut: layers are measured twice before a first step, not seven times.
vars(planning)["TO_BALANCE"] = Repeats(warming=1, counting=1, enough_s=0.5, long_s=10.0)
# No deadline: how long an example takes says nothing of whether it is right.
settings.register_profile("penstock", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("penstock")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --part."""
    parser.addoption(
        "--part", default="0/1", metavar="K/N", help="run the tests of the K-th of N parts, from 0"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one of N parts, into which tests fall by their names: N runs have run all of them."""
    part, count = map(int, config.getoption("--part").split("/"))
    chosen = [zlib.crc32(item.nodeid.encode()) % count == part % count for item in items]
    config.hook.pytest_deselected(
        items=[item for item, is_in in zip(items, chosen, strict=True) if not is_in]
    )
    items[:] = [item for item, is_in in zip(items, chosen, strict=True) if is_in]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Never collect again what was imported, which takes a tenth of many tests' time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed every global random number generator, so that a test gives the same result alone."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Take back what a command has set for its process, which is this one."""
    before = set(os.environ)
    yield
    for name in set(os.environ) - before:
        del os.environ[name]
