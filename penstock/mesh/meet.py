"""How the processes of a job meet: torch.distributed's rendezvous, with an answer to restarts.

torchrun's own process keeps the store that all of them meet at (without torchrun, rank 0 does),
and keeps it when it starts them again; addresses that an earlier attempt left there would be taken
for this one's.  So rank 0 first gives the attempt a name, and says which ranks do not come for it:

    hello/<rank>   each process: a word that nobody used before
    echo/<word>    rank 0: the name of the attempt, to whoever said that word
    ready/<rank>   the process: the name, which it believes since rank 0 knows its word

How often each asks the store does not grow with their number: rank 0 reads all in one request.
"""

import atexit
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from penstock.errors import MeshError

from .start import meeting_place, num_processes, process_rank
from .threads import THREAD_PREFIX, end_now, in_thread, note_failure

_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_MARGIN_S = 5.0
_MOST_NAMED = 8


def join(timeout_s: float, backends: str = "gloo") -> None:
    """Let the processes of a job meet, if they have not, with these backends of torch.

    Raises:
        ConfigError: the environment does not say where and who they are.
        MeshError: they do not find each other in time.
    """
    if dist.is_initialized():
        return
    rank, world_size, (address, port) = process_rank(), num_processes(), meeting_place()
    try:
        _within(timeout_s + _MARGIN_S, lambda: _meet(timeout_s, backends))
    except (RuntimeError, ValueError) as error:
        note_failure()
        raise MeshError(
            f"rank {rank} of {world_size} did not find the others at {address}:{port} within "
            f"{timeout_s:g} s: {first_line(error).rstrip('.')}. See that all "
            "processes run, each with a RANK of its own, that this host reaches that address "
            "(MASTER_ADDR, firewall), that the port is free on it (MASTER_PORT), and that "
            "GLOO_SOCKET_IFNAME names the right interface"
        ) from error


def _meet(timeout_s: float, backends: str) -> None:
    limit = timedelta(seconds=timeout_s)
    rank, world_size, (address, port) = process_rank(), num_processes(), meeting_place()
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        address,
        port,
        is_master=rank == 0 and not by_torchrun,
        wait_for_workers=False,  # those that do not come are named below
        multi_tenant=True,
        timeout=limit,
    )
    attempt = name_attempt(PrefixStore("penstock/meeting", store), rank, world_size, timeout_s)
    dist.init_process_group(
        backends,
        store=PrefixStore(f"penstock/{attempt}", store),
        rank=rank,
        world_size=world_size,
        timeout=limit,
    )
    dist.all_reduce(torch.zeros(()))  # gloo connects at first use: it waited for nobody so far


def _within(seconds: float, job: Callable[[], None]) -> None:
    """Run a job that may wait for ever: what is reached may be another program, which is silent.

    Raises:
        RuntimeError: it has not ended in time; its thread is left behind.
    """
    try:
        in_thread(job, f"{THREAD_PREFIX}meeting", daemon=True).result(seconds)
    except TimeoutError:
        atexit.register(end_now, 1)
        raise RuntimeError("what answers there does not speak as rank 0 would") from None


def name_attempt(store: Any, rank: int, world_size: int, timeout_s: float) -> str:
    """Agree on a name that no earlier attempt at the job had; the store may hold its words.

    Raises:
        RuntimeError: some process does not come in time; says which.
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
    """Answer each word, also one that takes the place of an earlier attempt's, until all know."""
    name, pause_s = uuid.uuid4().hex, _PAUSE_S
    answered: set[str] = set()
    hellos, ready = ([f"{what}/{rank}" for rank in others] for what in ("hello", "ready"))
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
    """Read values, in two requests; "" for each key unless all are there."""
    if not keys or not store.check(keys):
        return [""] * len(keys)
    return [value.decode() for value in store.multi_get(keys)]


@contextmanager
def meeting() -> Iterator[None]:
    """Say clearly what happened if a process leaves while all of them meet.

    Raises:
        MeshError: one did, or fell silent.
    """
    try:
        yield
    except RuntimeError as error:
        note_failure()
        raise MeshError(
            f"another process ended, or fell silent, while all of them met: {first_line(error)}. "
            "Its own message says why"
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says; those of torch go on with a stack of C++."""
    return str(error).strip().split("\n")[0]
