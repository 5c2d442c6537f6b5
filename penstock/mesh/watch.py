"""Who is alive: every process says so a few times a second, and tells the others when it fails.

The store that the processes met at holds, under a name of this attempt,

    alive/<rank>    a count that grows while the process runs
    failed          what went wrong first, and where; all others stop waiting when it appears
"""

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from penstock.errors import PeerError

_TICK_S = 0.2
"""How often a process says that it runs, in a small job; rarer in one of many processes."""
_SILENT_TICKS = 6
"""A process that has said nothing for so many ticks is suspected."""
_GRACE_S = 2.0
"""How long to wait for the first culprit's own account after a connection broke."""
_LINGER_TICKS = 4
"""How long a process that fails stays, so that the others read of it before connections break."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a process said before it ended."""

    rank: int
    text: str


class Watch:
    """The thread that keeps a process in touch with the others."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.rank, self._world_size = rank, world_size
        self._tick_s = max(_TICK_S, world_size * 1e-3)
        self._store = store
        self._names = [""] * world_size
        self._lock = threading.Lock()
        self._waiting: dict[int, Any] = {}
        self._failure: Failure | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-watch", daemon=True)

    @classmethod
    def start(cls, rank: int, world_size: int, timeout_s: float) -> "Watch":
        """Begin to watch; call once the processes have met."""
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if host is not None and port is not None:  # a connection that nobody else blocks
            store: Any = TCPStore(
                host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s)
            )
        else:
            store = dist.distributed_c10d._get_default_store()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        watch = cls(PrefixStore(f"penstock/{attempt}", store), rank, world_size)
        watch._thread.start()
        return watch

    def name_ranks(self, names: Iterable[str]) -> None:
        """Say what each rank is, for messages."""
        self._names = list(names)

    def name(self, rank: int) -> str:
        """Name a rank as messages do."""
        return f"rank {rank} ({self._names[rank]})" if self._names[rank] else f"rank {rank}"

    # -- telling the others -----------------------------------------------------------------------

    def report(self, error: BaseException) -> None:
        """Tell all processes that this one fails; the first to say so counts."""
        if isinstance(error, PeerError) or self._failure is not None:
            return
        notes = "; ".join(getattr(error, "__notes__", []))
        text = f"{type(error).__name__}: {error}" + (f" ({notes})" if notes else "")
        try:
            self._store.compare_set("failed", "", json.dumps([self.rank, text]))
        except RuntimeError:
            return  # the store is gone: its host has ended, and everyone sees that
        time.sleep(_LINGER_TICKS * self._tick_s)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Tell all processes of whatever is raised inside."""
        try:
            yield
        except BaseException as error:
            self.report(error)
            raise

    # -- waiting ----------------------------------------------------------------------------------

    def wake_on_failure(self, slot: Any) -> None:
        """Let `slot` fail as soon as another process does."""
        with self._lock:
            if self._failure is None:
                self._waiting[id(slot)] = slot
                return
        slot.fail(self._peer_error(self._failure, ""))

    def forget(self, slot: Any) -> None:
        """Stop minding a slot that has its outcome."""
        with self._lock:
            self._waiting.pop(id(slot), None)

    def explain(self, error: RuntimeError, what: str) -> BaseException:
        """Turn what a broken wait raised into who is to blame for it."""
        if isinstance(error, PeerError):
            return error if error.complete else PeerError(f"{error}; {self._waited(what)}")
        deadline = time.monotonic() + _GRACE_S
        while self._failure is None and time.monotonic() < deadline and self._look():
            time.sleep(self._tick_s / 4)
        if self._failure is not None:
            return self._peer_error(self._failure, what)
        found = PeerError(
            f"a connection broke while {self._waited(what)}: "
            f"{str(error).strip().splitlines()[0]}. {self._suspects()}"
        )
        self.report(RuntimeError(str(found)))
        return found

    def late(self, what: str, timeout_s: float) -> str:
        """Say that a wait outlived its deadline, and who is silent."""
        return f"{self._waited(what)} for {timeout_s:g} s. {self._suspects()}"

    def _waited(self, what: str) -> str:
        return f"{self.name(self.rank)} waited {what}"

    def _suspects(self) -> str:
        """Listen for a moment, and name who says nothing."""
        before = self._counts()
        time.sleep(_SILENT_TICKS * self._tick_s)
        after = self._counts()
        silent = [self.name(r) for r in range(self._world_size) if before[r] == after[r]]
        if silent and len(silent) < self._world_size:
            return f"No sign of life from {', '.join(silent)}: stopped, killed or cut off"
        return "All processes are alive; one may be busy, or may have gone another way"

    def _counts(self) -> list[str]:
        keys = [f"alive/{rank}" for rank in range(self._world_size)]
        try:
            return [
                self._store.get(key).decode() if self._store.check([key]) else "" for key in keys
            ]
        except RuntimeError:
            return [""] * self._world_size

    def _peer_error(self, failure: Failure, what: str) -> PeerError:
        text = f"{self.name(failure.rank)} failed: {failure.text}"
        if what:
            return PeerError(f"{text}; {self._waited(what)}", complete=True)
        return PeerError(text)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        count = 0
        while not self._ended.wait(self._tick_s):
            count += 1
            try:
                self._store.set(f"alive/{self.rank}", str(count))
                if not self._look():
                    return
            except RuntimeError:
                self._tell(Failure(0, "the place where the processes met (MASTER_ADDR) is gone"))
                return

    def _look(self) -> bool:
        """Look whether somebody failed; tell those that wait.  False once somebody did."""
        if self._failure is not None:
            return False
        try:
            if not self._store.check(["failed"]):
                return True
            rank, text = json.loads(self._store.get("failed"))
        except RuntimeError:
            return True
        self._tell(Failure(rank, text))
        return False

    def _tell(self, failure: Failure) -> None:
        with self._lock:
            self._failure = failure
            waiting, self._waiting = list(self._waiting.values()), {}
        for slot in waiting:
            slot.fail(self._peer_error(failure, ""))

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(timeout=5.0)
