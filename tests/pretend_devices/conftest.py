"""Each test of this folder has two pretended GPUs."""

from collections.abc import Iterator

import pytest

from .install import pretended_devices
from .memory import Memory


@pytest.fixture
def memory() -> Iterator[Memory]:
    """The memory of the pretended GPUs, with the races found."""
    with pretended_devices(2) as found:
        yield found
