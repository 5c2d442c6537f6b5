"""What a process says when a wait breaks: the one that failed first is to blame."""

from torch._C._distributed_c10d import HashStore

from penstock.errors import PeerError
from penstock.mesh.watch import Watch


class LateAccount:
    """A store in which rank 2's account appears while rank 1 listens who else is alive."""

    def __init__(self) -> None:
        self._store = HashStore()
        self._listened = 0

    def check(self, keys: list[str]) -> bool:
        self._listened += keys == ["alive/0"]
        if self._listened == 2:
            self._store.set("failed", '[2, "ValueError: boom"]')
        return self._store.check(keys)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)


def test_an_account_that_comes_late_is_still_believed() -> None:
    """Once, the place where all had met was said to be gone: the thread that asks it ends when it
    knows of a failure, and so did not answer the one that looked for suspects.
    """
    watch = Watch(LateAccount(), "somewhere:1", rank=1, world_size=3)
    watch._tick_s = 0.02
    watch._thread.start()
    error = watch.explain(RuntimeError("Connection reset by peer"), "for the loss", peer=None)
    assert isinstance(error, PeerError)
    assert str(error) == "rank 2 failed: ValueError: boom; rank 1 waited for the loss"
    watch.close()
