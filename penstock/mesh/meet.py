"""Rendezvous of the processes of a job: torch.distributed's, safe against restarts.

torchrun's own process keeps the store of the rendezvous (without torchrun, rank 0 does), and keeps
it across restarts.  Addresses of an earlier attempt would be taken for current ones.  So rank 0
first names the attempt, and reports the ranks that do not come:

    hello/<rank>   each process: a random word, new in each attempt
    echo/<word>    rank 0: the name of the attempt, for the process with that word
    ready/<rank>   the process: the name, which it trusts because rank 0 knows its word

The number of requests of each process does not grow with the number of processes: rank 0 reads all
keys in one request.
"""

import atexit
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from penstock.errors import MeshError

from .start import meeting_place, num_processes, process_rank
from .threads import THREAD_PREFIX, end_now, in_thread, note_failure

_PAUSE_S = 0.02
"""Seconds between rank 0's first two reads; each pause is twice the one before."""
_LONGEST_PAUSE_S = 0.5
"""The longest such pause, in seconds."""
_MARGIN_S = 5.0
"""Seconds that torch has beyond the deadline to raise its own error."""
_MOST_NAMED = 8
"""Absent ranks that an error names."""


def join(timeout_s: float, backends: str) -> None:
    """Initialize torch.distributed with these backends, unless that is done.

    Raises:
        ConfigError: the environment lacks a rank, a world size or an address.
        MeshError: the processes do not find each other in time.
    """
    if dist.is_initialized():
        return
    # 1. Prepare: a store at rank 0, or torchrun's; a name for this attempt; process groups.
    rank, world_size, (address, port) = process_rank(), num_processes(), meeting_place()
    limit = timedelta(seconds=timeout_s)

    def meet() -> None:
        by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = TCPStore(
            address,
            port,
            is_master=rank == 0 and not by_torchrun,
            wait_for_workers=False,  # `name_attempt` waits, and names absent ranks
            multi_tenant=True,
            timeout=limit,
        )
        meeting_store = PrefixStore("penstock/meeting", store)
        attempt = name_attempt(meeting_store, rank, world_size, timeout_s)
        dist.init_process_group(
            backends,
            store=PrefixStore(f"penstock/{attempt}", store),
            rank=rank,
            world_size=world_size,
            timeout=limit,
        )
        dist.all_reduce(torch.zeros(()))  # gloo connects at first use: it waited for nobody so far

    # 2. Run in a thread: another program may listen at that address and never answer.
    try:
        in_thread(meet, f"{THREAD_PREFIX}meeting", daemon=True).result(timeout_s + _MARGIN_S)
    except (RuntimeError, ValueError, TimeoutError) as error:
        reason = first_line(error).rstrip(".")
        if isinstance(error, TimeoutError):
            atexit.register(end_now, 1)  # the thread is left behind
            reason = "what answers there does not speak as rank 0 would"
        note_failure()
        raise MeshError(
            f"rank {rank} of {world_size} did not find the others at {address}:{port} within "
            f"{timeout_s:g} s: {reason}. See that all "
            "processes run, each with a RANK of its own, that this host reaches that address "
            "(MASTER_ADDR, firewall), that the port is free on it (MASTER_PORT), and that "
            "GLOO_SOCKET_IFNAME names the right interface"
        ) from error


def name_attempt(store: Any, rank: int, world_size: int, timeout_s: float) -> str:
    """Agree on a new name for this attempt at the job; the store may hold words of earlier ones.

    A RuntimeError names a process that does not come in time.
    """
    if rank == 0:
        return _name_for_all(store, range(1, world_size), time.monotonic() + timeout_s)
    word = uuid.uuid4().hex
    store.set(f"hello/{rank}", word)
    answer = f"echo/{word}"
    try:
        store.wait([answer], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RuntimeError(f"rank 0 did not answer ({first_line(error)})") from error
    name: str = store.get(answer).decode()
    store.set(f"ready/{rank}", name)
    return name


def _name_for_all(store: Any, others: Sequence[int], deadline: float) -> str:
    """Answer the word of each process until all are ready; return the name of the attempt.

    A word of an earlier attempt is answered too, and then the word that replaces it.
    """
    name, pause_s = uuid.uuid4().hex, _PAUSE_S
    answered: set[str] = set()
    hellos, ready = ([f"{kind}/{rank}" for rank in others] for kind in ("hello", "ready"))
    while set(_read(store, ready)) - {name}:
        words = set(filter(None, _read(store, hellos))) - answered
        if words:
            store.multi_set([f"echo/{word}" for word in words], [name] * len(words))
            answered |= words
        if time.monotonic() > deadline:
            absent = [r for r in others if not store.check([f"hello/{r}"])]
            silent = [r for r in others if _read(store, [f"ready/{r}"]) != [name]]
            some = ", ".join(map(str, (absent or silent)[:_MOST_NAMED]))
            raise RuntimeError(f"rank {some} did not come")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return name


def _read(store: Any, keys: Sequence[str]) -> list[str]:
    """Read values, in two requests; "" for each key unless all keys exist."""
    if not keys or not store.check(keys):
        return [""] * len(keys)
    return [value.decode() for value in store.multi_get(keys)]


@contextmanager
def meeting() -> Iterator[None]:
    """Raise MeshError if a process leaves, or falls silent, during the rendezvous."""
    try:
        yield
    except RuntimeError as error:
        note_failure()
        raise MeshError(
            f"another process ended, or fell silent, while all of them met: {first_line(error)}. "
            "Its own message says why"
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; torch's errors continue with a C++ stack."""
    return str(error).strip().split("\n")[0]
