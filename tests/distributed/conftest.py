"""No test leaves a process behind, and none takes another's port."""

import uuid
from collections.abc import Iterator

import pytest

from tests.distributed.launch import held_port, left_behind, number_of


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End what was started during a test and lives on, but for what forks; there must be none."""
    mark = f"PENSTOCK_TEST_CASE={uuid.uuid4().hex}"
    monkeypatch.setenv(*mark.split("="))
    yield
    left = left_behind(mark)
    assert not left, left


@pytest.fixture
def port() -> Iterator[str]:
    """Give a port that is the test's own."""
    with held_port() as held:
        yield number_of(held)
