"""Heartbeats and failure reports: each process learns within seconds that another one failed.

A thread writes and reads these keys of the rendezvous' store, under the name of this attempt:

    alive/<rank>    the heartbeat: a count that grows while the process runs
    failed          the first failure and its rank; all others stop waiting when it appears
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from penstock.errors import PeerError, PenstockError, WaitTimeout
from penstock.torch_private import default_store

from .threads import THREAD_PREFIX, note_failure

_TICK_S = 0.2
"""Seconds between two heartbeats of a process; more in a job of many processes."""
_SILENT_TICKS = 6
"""Ticks without a heartbeat after which a process is suspected."""
_GRACE_TICKS = 3
"""Ticks to wait for the culprit's own report after a connection broke."""
_LINGER_TICKS = 4
"""Ticks that a failing process stays, so that others read its report before connections break."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The rank of a process that failed, and the text of its error."""

    rank: int
    text: str


class Watch:
    """The thread that exchanges heartbeats and failures with the other processes.

    `names` and `hosts` describe each rank in messages; others set them once they know.
    """

    def __init__(self, store: Any, place: str, rank: int, world_size: int) -> None:
        self._place = place
        self.rank, self._world_size = rank, world_size
        self._tick_s = max(_TICK_S, world_size * 1e-3)
        self._store = store
        self.names = [""] * world_size
        self.hosts: list[str] = []
        self._lock = threading.Lock()
        self._waiting: dict[int, Any] = {}
        self._failure: Failure | None = None
        self._to_tell: Failure | None = None
        # Set by the thread: this process's failure is told; a failure is known to this process.
        self._told, self._known = threading.Event(), threading.Event()
        self._counts: list[str] = []
        self._counted = threading.Event()  # cleared to ask for new heartbeats
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"{THREAD_PREFIX}watch", daemon=True
        )

    @classmethod
    def start(cls, rank: int, world_size: int, timeout_s: float, attempt: str) -> "Watch":
        """Start the thread; call after the rendezvous.

        `attempt` is the name of this attempt at the job, the same in all processes: one store may
        serve several attempts.
        """
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if host is not None and port is not None:  # a connection that nobody else blocks
            place, limit = f"{host}:{port}", timedelta(seconds=timeout_s)
            store: Any = TCPStore(host, int(port), is_master=False, timeout=limit)
        else:
            place, store = "torch's own store", default_store()
        watch = cls(PrefixStore(f"penstock/{attempt}", store), place, rank, world_size)
        watch._thread.start()
        return watch

    def host(self, rank: int) -> str:
        """Return the host of a rank, for messages."""
        return f"host {self.hosts[rank]}" if self.hosts else "an unknown host"

    def name(self, rank: int) -> str:
        """Return the name of a rank, for messages."""
        return f"rank {rank} ({self.names[rank]})" if self.names[rank] else f"rank {rank}"

    # -- telling the others -----------------------------------------------------------------------

    def report(self, error: BaseException) -> None:
        """Tell all processes that this one fails; the first report counts."""
        if isinstance(error, PeerError) or self._failure is not None:
            return
        notes = "; ".join(getattr(error, "__notes__", []))
        text = f"{type(error).__name__}: {error}" + (f" ({notes})" if notes else "")
        if self._announce(Failure(self.rank, text)):
            time.sleep(_LINGER_TICKS * self._tick_s)

    def lose(self, rank: int, why: str) -> None:
        """Tell all processes that `rank` is gone, unless a failure explains it.

        The process may have ended because of a failure, or may have reported its own.
        """
        self._await_account()
        if self._failure is None and self._to_tell is None and not self._ended.is_set():
            failure = Failure(rank, why)
            self._announce(failure)
            if self._failure is None:
                self._tell(failure)

    def _announce(self, failure: Failure) -> bool:
        """Let the thread tell all processes; return True if it could."""
        self._to_tell = failure
        note_failure()
        return self._told.wait((_LINGER_TICKS + 1) * self._tick_s)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Tell all processes of any error raised inside, except one that all raise alike."""
        try:
            yield
        except BaseException as error:
            if not (isinstance(error, PenstockError) and error.is_agreed):
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
        """Stop watching for a slot that has its outcome."""
        with self._lock:
            self._waiting.pop(id(slot), None)

    def explain(self, error: Exception, purpose: str, peer: int | None) -> BaseException:
        """Return the error of a broken wait for `peer`, with the culprit's name; tell all.

        If the peer left because of another failure, it stayed until that was reported.
        """
        if isinstance(error, PeerError):
            return error if error.complete else PeerError(f"{error}; {self._waited(purpose)}")
        self._await_account()
        if self._failure is not None:
            return self._peer_error(self._failure, purpose)
        suspects = self._suspects()
        if self._failure is not None:  # a peer whose own wait was overdue tells so only now
            return self._peer_error(self._failure, purpose)
        who = suspects if peer is None else f"{self.name(peer)} has ended or was killed"
        reason = str(error).strip().splitlines()[0]
        text = f"{who}: a connection broke while {self._waited(purpose)} ({reason})"
        self.report(RuntimeError(text))
        return PeerError(text, complete=True)

    def overdue(self, purpose: str, timeout_s: float) -> BaseException:
        """Return the error of an overdue wait, which names silent processes; tell all."""
        suspects = self._suspects()
        if self._failure is not None:
            return self._peer_error(self._failure, purpose)
        error = WaitTimeout(f"{self._waited(purpose)} for {timeout_s:g} s. {suspects}")
        self.report(error)
        return error

    def _await_account(self) -> None:
        self._known.wait(_GRACE_TICKS * self._tick_s)

    def _waited(self, purpose: str) -> str:
        return f"{self.name(self.rank)} waited {purpose}"

    def _suspects(self) -> str:
        """Compare two rounds of heartbeats; return the ranks without a new one, as a sentence.

        Returns "" if a failure is reported meanwhile.
        """
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
        """Ask the thread for all heartbeats; return None if it does not answer."""
        self._counted.clear()
        return list(self._counts) if self._counted.wait(_SILENT_TICKS * self._tick_s) else None

    def _peer_error(self, failure: Failure, purpose: str) -> PeerError:
        text = f"{self.name(failure.rank)} failed: {failure.text}"
        if purpose:
            return PeerError(f"{text}; {self._waited(purpose)}", complete=True)
        return PeerError(text)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        """Do all requests of the store here: if the store hangs, only this thread does."""
        count = 0
        while self._failure is None and not self._ended.wait(self._tick_s):
            count += 1
            try:
                self._store.set(f"alive/{self.rank}", str(count))
                # Tell this process's failure; the first to write the key counts.
                if self._to_tell is not None and not self._told.is_set():
                    message = json.dumps([self._to_tell.rank, self._to_tell.text])
                    self._store.compare_set("failed", "", message)
                    self._told.set()
                # Read another's failure; wake all waits.
                if (
                    self._failure is None
                    and self._to_tell is None
                    and (text := self._read("failed"))
                ):
                    self._tell(Failure(*json.loads(text)))
                # Read heartbeats, if a wait is overdue and asks for them.
                if not self._counted.is_set():
                    self._counts = [self._read(f"alive/{r}") for r in range(self._world_size)]
                    self._counted.set()
            except RuntimeError:
                self._tell(
                    Failure(0, f"it kept the place where all met ({self._place}), now gone")
                )
                return

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _tell(self, failure: Failure) -> None:
        note_failure()
        with self._lock:
            self._failure = failure
            waiting, self._waiting = list(self._waiting.values()), {}
        self._known.set()
        for slot in reversed(waiting):  # the first ones are torch's waits, which may take long
            with suppress(Exception):  # an error of one must not keep the others waiting
                slot.fail(self._peer_error(failure, ""))

    def close(self) -> None:
        """End the thread; on rank 0, which may keep the store, after all could read a failure."""
        if self.knows_failure and self.rank == 0 and not self._ended.is_set():
            time.sleep(_LINGER_TICKS * self._tick_s)
        self._ended.set()
        self._thread.join(timeout=4 * self._tick_s)

    @property
    def knows_failure(self) -> bool:
        """True if this process or another one has failed."""
        return self._failure is not None or self._to_tell is not None

    @property
    def has_ended(self) -> bool:
        """True if the thread has ended."""
        return not self._thread.is_alive()
