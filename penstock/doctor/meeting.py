"""Where the processes of a job meet, before there is a mesh that could watch over them.

The store at MASTER_ADDR:MASTER_PORT holds, under a name of this attempt,

    arrived/<rank>   how many processes came with this rank
    facts/<rank>     what it brought along
    arrived          how many came in all
    stop             why the meeting cannot succeed; all others stop waiting when it appears
    reported, left   rank 0 has written its report; how many others have seen that and gone

Every wait here asks again and again until the deadline, and says who is missing.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from penstock.errors import MeshError

from .facts import RankFacts
from .finding import named
from .settings import Place

_TORCHRUN = "TORCHELASTIC_RUN_ID"
_ASK_S = 0.05
_LINGER_S = 2.0
"""How long the one that keeps the store stays, so that the others read what is in it."""


class Meeting:
    """The store that all processes reach, and the deadline of each wait there."""

    def __init__(self, place: Place, timeout_s: float) -> None:
        """Go to the place.

        Raises:
            MeshError: nobody keeps a store there.
        """
        self._place, self._timeout_s = place, timeout_s
        if not place.keeps_store:
            self._reach()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        try:
            store = TCPStore(
                place.address,
                place.port,
                is_master=place.keeps_store,
                wait_for_workers=False,
                multi_tenant=True,  # torch.distributed will keep its own at this port
                timeout=timedelta(seconds=timeout_s),
            )
        except RuntimeError as failure:
            raise MeshError(
                f"rank {place.rank} found no store at {self._where}: "
                f"{str(failure).splitlines()[0]}. See that MASTER_PORT is the same everywhere and "
                "that no other program has it"
            ) from failure
        self._store: Any = PrefixStore(f"penstock/doctor/{attempt}", store)

    @property
    def _where(self) -> str:
        return f"{self._place.address}:{self._place.port}"

    def _reach(self) -> None:
        """Wait until something listens, so that a store that is not there is said in one line."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                socket.create_connection((self._place.address, self._place.port), 2.0).close()
                return
            except OSError as failure:
                if time.monotonic() > deadline:
                    raise MeshError(
                        f"rank {self._place.rank} reached nobody at {self._where} within "
                        f"{self._timeout_s:g} s ({failure.strerror or failure}): rank 0 does not "
                        "run, or a firewall stands between. See that rank 0 is started, and that "
                        "MASTER_ADDR and MASTER_PORT are its own on every host"
                    ) from failure
            time.sleep(_ASK_S)

    def exchange(self, mine: RankFacts) -> tuple[RankFacts, ...]:
        """Bring one's facts along, and wait for everyone's.

        Raises:
            MeshError: not all ranks come in time, or one comes twice.
        """
        with _naming_the_keeper(self._place):
            self._arrive(mine)
            deadline = time.monotonic() + self._timeout_s
            while self._store.add("arrived", 0) < self._place.world_size:
                if self._store.check(["stop"]):
                    raise self._stopped(self._store.get("stop").decode())
                if time.monotonic() > deadline:
                    raise self._stop(self._absent())
                time.sleep(_ASK_S)
            keys = [f"facts/{rank}" for rank in range(self._place.world_size)]
            return tuple(map(_facts, self._store.multi_get(keys)))

    def _arrive(self, mine: RankFacts) -> None:
        if self._store.add(f"arrived/{mine.rank}", 1) > 1:
            self._await(lambda: self._has(mine.rank), self._timeout_s)
            first = self._facts_of(mine.rank)
            raise self._stop(
                f"RANK={mine.rank} was given to two processes: {first.pid} on {first.host} and "
                f"{mine.pid} on {mine.host}. Start all processes with torchrun, or give each "
                "number from 0 to WORLD_SIZE - 1 once"
            )
        self._store.set(f"facts/{mine.rank}", json.dumps(mine.to_dict()))
        self._store.add("arrived", 1)

    def _has(self, rank: int) -> bool:
        return bool(self._store.check([f"facts/{rank}"]))

    def _facts_of(self, rank: int) -> RankFacts:
        return _facts(self._store.get(f"facts/{rank}"))

    def _absent(self) -> str:
        world = range(self._place.world_size)
        came = [rank for rank in world if self._has(rank)]
        absent = [rank for rank in world if rank not in came]
        hosts = sorted({self._facts_of(rank).host for rank in came})
        return (
            f"{named(absent)} of {len(world)} did not come to {self._where} within "
            f"{self._timeout_s:g} s; {named(came)} did, on {', '.join(hosts)}. See that all are "
            "started, with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and that their hosts "
            "reach that address (firewall)"
        )

    def _stop(self, why: str) -> MeshError:
        self._store.set("stop", why)
        return self._stopped(why)

    def _stopped(self, why: str) -> MeshError:
        """End the meeting here; who keeps the store first lets the others read why."""
        if self._place.keeps_store:
            time.sleep(_LINGER_S)
        return MeshError(why)

    def leave(self) -> bool:
        """Go, rank 0 after its report and the others after that: torchrun ends all when one goes.

        Returns:
            Whether rank 0 has written its report.
        """
        reported = self._place.rank == 0
        with suppress(RuntimeError):  # the store went with rank 0: there is nothing to wait for
            if reported:
                others = self._place.world_size - 1
                self._store.set("reported", "yes")
                self._await(lambda: self._store.add("left", 0) == others, _LINGER_S)
            else:
                reported = self._await(lambda: self._store.check(["reported"]), self._timeout_s)
                self._store.add("left", 1)
        return reported

    def _await(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `condition`; tells whether it came true in time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(_ASK_S)
        return True


def _facts(written: bytes) -> RankFacts:
    return RankFacts.from_dict(json.loads(written))


@contextmanager
def _naming_the_keeper(place: Place) -> Iterator[None]:
    """Turn a store that is gone into who kept it."""
    try:
        yield
    except RuntimeError as failure:
        keeper = "rank 0" if _TORCHRUN not in os.environ else "torchrun's own process"
        raise MeshError(
            f"where the processes met ({place.address}:{place.port}) nothing answers any more: "
            f"{keeper}, which kept the store, has ended. What it wrote last says why"
        ) from failure
