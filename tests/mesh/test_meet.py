"""Processes that meet again where earlier ones met agree on a name that those did not have."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from penstock.mesh.meet import name_attempt
from penstock_recipes.train.environment import job_name
from penstock_recipes.train.run_folder import begun_by, create


def meet(store: HashStore, world_size: int) -> set[str]:
    """Let so many processes meet; give the names they believe."""
    with ThreadPoolExecutor(world_size) as pool:
        ranks = range(world_size)
        return set(pool.map(lambda rank: name_attempt(store, rank, world_size, 20.0), ranks))


def test_all_processes_of_an_attempt_have_one_name_that_no_other_attempt_has() -> None:
    store = HashStore()
    names = [meet(store, world_size) for world_size in (3, 3, 2, 4, 1, 4)]
    assert all(len(of_attempt) == 1 for of_attempt in names)
    assert len(set.union(*names)) == len(names)


def test_an_attempt_that_was_broken_off_misleads_nobody() -> None:
    store = HashStore()
    with pytest.raises(RuntimeError, match="rank 0 did not answer"):
        name_attempt(store, 1, 2, 0.1)
    with pytest.raises(RuntimeError, match="rank 1 did not come"):
        name_attempt(store, 0, 2, 0.1)  # answers the word of a process that is gone
    assert len(meet(store, 2)) == 1


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(RuntimeError, match="rank 1, 2 did not come"):
        name_attempt(HashStore(), 0, 3, 0.1)


class Counting:
    """A connection to a store that counts what is asked."""

    def __init__(self, store: Any) -> None:
        self._store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self._store, name)


def requests_of(world_size: int) -> list[int]:
    """Let so many processes meet, each with a connection of its own; count what each asks."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connect(_: int) -> Counting:
        store = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        return Counting(PrefixStore("meeting", store))

    with ThreadPoolExecutor(world_size) as pool:
        stores = list(pool.map(connect, range(world_size)))
        ranks = range(world_size)
        names = pool.map(lambda r: name_attempt(stores[r], r, world_size, 60.0), ranks)
        assert len(set(names)) == 1
    return [store.requests for store in stores]


@pytest.mark.parametrize("world_size", (20, pytest.param(1000, marks=pytest.mark.slow)))
def test_what_a_process_asks_the_store_does_not_grow_with_their_number(world_size: int) -> None:
    few, many = requests_of(3), requests_of(world_size)
    assert set(few[1:]) == set(many[1:]) == {4}
    assert many[0] < 200  # rank 0 asks until all have come: for all of them at once


def test_a_job_is_called_as_torchrun_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert job_name() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "night-7")
    assert job_name() == "night-7"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert job_name() == job_name() != "none"


def test_a_job_finds_the_newest_folder_it_began(tmp_path: Path) -> None:
    for name, jobs in (("a", ["one"]), ("b", ["two", "2"]), ("c", ["one"]), ("d", [])):
        create(tmp_path / name, "", jobs)
    assert begun_by("two", tmp_path.iterdir()) == tmp_path / "b"
    assert begun_by("2", tmp_path.iterdir()) == tmp_path / "b"
    assert begun_by("three", tmp_path.iterdir()) is None
    assert begun_by(None, tmp_path.iterdir()) is None
