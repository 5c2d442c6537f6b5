"""No test leaves a process behind."""

import uuid
from collections.abc import Iterator

import pytest

from tests.distributed.launch import left_behind


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End what was started during a test and lives on, but for what forks; there must be none."""
    mark = f"PENSTOCK_TEST_CASE={uuid.uuid4().hex}"
    monkeypatch.setenv(*mark.split("="))
    yield
    left = left_behind(mark)
    assert not left, left
