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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from penstock.errors import PeerError, UncountedError, WaitTimeout
from penstock.torch_private import default_store

from .threads import THREAD_PREFIX, note_failure

_TICK_S = 0.2
"""How often a process says that it runs, in a small job; rarer in one of many processes."""
_SILENT_TICKS = 6
"""A process that has said nothing for so many ticks is suspected."""
_GRACE_TICKS = 3
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

    def __init__(self, store: Any, place: str, rank: int, world_size: int) -> None:
        self._place = place
        self.rank, self._world_size = rank, world_size
        self._tick_s = max(_TICK_S, world_size * 1e-3)
        self._store = store
        self._names = [""] * world_size
        self._hosts: list[str] = []
        self._lock = threading.Lock()
        self._waiting: dict[int, Any] = {}
        self._failure: Failure | None = None
        self._to_tell: Failure | None = None
        self._told, self._known = threading.Event(), threading.Event()
        self._counts: list[str] = []
        self._counted = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"{THREAD_PREFIX}watch", daemon=True
        )

    @classmethod
    def start(cls, rank: int, world_size: int, timeout_s: float, attempt: str) -> "Watch":
        """Begin to watch; call once the processes have met.

        `attempt` is a name that all of them have, and no earlier attempt at the job had: the store
        may be the same for all.
        """
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if host is not None and port is not None:  # a connection that nobody else blocks
            store: Any = TCPStore(
                host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s)
            )
        else:
            store = default_store()
        place = f"{host}:{port}" if host is not None and port is not None else "torch's own store"
        watch = cls(PrefixStore(f"penstock/{attempt}", store), place, rank, world_size)
        watch._thread.start()
        return watch

    def name_ranks(self, names: Iterable[str]) -> None:
        """Say what each rank is, for messages."""
        self._names = list(names)

    def name_hosts(self, names: Iterable[str]) -> None:
        """Say where each rank runs, for messages."""
        self._hosts = list(names)

    def host(self, rank: int) -> str:
        """Name the host of a rank as messages do."""
        return f"host {self._hosts[rank]}" if self._hosts else "an unknown host"

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
        if self._announce(Failure(self.rank, text)):
            time.sleep(_LINGER_TICKS * self._tick_s)

    def lose(self, rank: int, why: str) -> None:
        """Tell all processes that `rank` is gone, unless something is known to have gone wrong.

        It may have ended because of a failure, or have said itself what went wrong.
        """
        self._await_account()
        if self._failure is None and self._to_tell is None and not self._ended.is_set():
            failure = Failure(rank, why)
            self._announce(failure)
            if self._failure is None:
                self._tell(failure)

    def _announce(self, failure: Failure) -> bool:
        """Let the thread tell all processes; tells whether it could."""
        self._to_tell = failure
        note_failure()
        return self._told.wait((_LINGER_TICKS + 1) * self._tick_s)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Tell all processes of whatever is raised inside, but for what all raise alike."""
        try:
            yield
        except UncountedError:
            raise
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

    def explain(self, error: Exception, what: str, peer: int | None) -> BaseException:
        """Turn what a broken wait for `peer` raised into who is to blame for it, and tell all.

        The peer may have left because of another's failure; it then stayed long enough for that
        to be known.
        """
        if isinstance(error, PeerError):
            return error if error.complete else PeerError(f"{error}; {self._waited(what)}")
        self._await_account()
        if self._failure is not None:
            return self._peer_error(self._failure, what)
        suspects = self._suspects()
        if self._failure is not None:  # a peer whose own wait was overdue tells so only now
            return self._peer_error(self._failure, what)
        who = suspects if peer is None else f"{self.name(peer)} has ended or was killed"
        reason = str(error).strip().splitlines()[0]
        found = f"{who}: a connection broke while {self._waited(what)} ({reason})"
        self.report(RuntimeError(found))
        return PeerError(found, complete=True)

    def overdue(self, what: str, timeout_s: float) -> BaseException:
        """Say that a wait outlived its deadline, and who is silent; tell all."""
        suspects = self._suspects()
        if self._failure is not None:
            return self._peer_error(self._failure, what)
        error = WaitTimeout(f"{self._waited(what)} for {timeout_s:g} s. {suspects}")
        self.report(error)
        return error

    def _await_account(self) -> None:
        self._known.wait(_GRACE_TICKS * self._tick_s)

    def _waited(self, what: str) -> str:
        return f"{self.name(self.rank)} waited {what}"

    def _suspects(self) -> str:
        """Listen for a moment, and name who says nothing; "" if a failure is told meanwhile."""
        before = self._listen()
        if self._known.wait(_SILENT_TICKS * self._tick_s):
            return ""
        after = self._listen()
        if before is None or after is None:
            if self._failure is not None:  # the thread has ended, since it knows
                return ""
            return (
                f"Where the processes met ({self._place}) nothing answers any more: the process "
                f"that keeps it, {self.name(0)} or torchrun's own, was stopped, killed or cut off"
            )
        silent = [self.name(r) for r in range(self._world_size) if before[r] == after[r]]
        if silent:
            return f"No sign of life from {', '.join(silent)}: stopped, killed or cut off"
        return "All processes are alive; one may be busy, or may have gone another way"

    def _listen(self) -> list[str] | None:
        """Ask the thread for what everyone said last; None if it gets no answer."""
        self._counted.clear()
        return list(self._counts) if self._counted.wait(_SILENT_TICKS * self._tick_s) else None

    def _peer_error(self, failure: Failure, what: str) -> PeerError:
        text = f"{self.name(failure.rank)} failed: {failure.text}"
        if what:
            return PeerError(f"{text}; {self._waited(what)}", complete=True)
        return PeerError(text)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        """Do all that needs the store: it may stop to answer, and then only this thread hangs."""
        count = 0
        while self._failure is None and not self._ended.wait(self._tick_s):
            count += 1
            try:
                self._store.set(f"alive/{self.rank}", str(count))
                self._say()
                self._look()
                if not self._counted.is_set():
                    self._counts = [self._read(f"alive/{r}") for r in range(self._world_size)]
                    self._counted.set()
            except RuntimeError:
                self._tell(
                    Failure(0, f"it kept the place where all met ({self._place}), now gone")
                )
                return

    def _say(self) -> None:
        """Pass on that this process fails; the first to say so counts."""
        if self._to_tell is not None and not self._told.is_set():
            told = json.dumps([self._to_tell.rank, self._to_tell.text])
            self._store.compare_set("failed", "", told)
            self._told.set()

    def _look(self) -> None:
        """Look whether somebody failed; tell those that wait."""
        if self._failure is None and self._to_tell is None and (said := self._read("failed")):
            rank, text = json.loads(said)
            self._tell(Failure(rank, text))

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _tell(self, failure: Failure) -> None:
        note_failure()
        with self._lock:
            self._failure = failure
            waiting, self._waiting = list(self._waiting.values()), {}
        self._known.set()
        for slot in reversed(waiting):  # what waits in torch was there first, and may take long
            with suppress(Exception):  # all others are to be woken whatever happens to one
                slot.fail(self._peer_error(failure, ""))

    def close(self) -> None:
        """End the thread; rank 0, which may keep the store, first lets all read of a failure."""
        if self.knows_failure and self.rank == 0 and not self._ended.is_set():
            time.sleep(_LINGER_TICKS * self._tick_s)
        self._ended.set()
        self._thread.join(timeout=4 * self._tick_s)

    @property
    def knows_failure(self) -> bool:
        """Whether this process or another one has failed."""
        return self._failure is not None or self._to_tell is not None

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()
