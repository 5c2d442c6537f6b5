"""Authenticate incoming connections without waiting for any one of them.

A stranger may connect and say nothing, or a byte a second: it costs a socket for a while.
"""

import hmac
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from .readiness import Alarm, Readiness

SECRET_BYTES = 16
HELLO = struct.Struct(f"!{SECRET_BYTES}sII")
"""What a process says first: the secret that lets it in, its rank, the connection's number."""
_HELLO_S = 5.0
"""Who has not said all of it by then is turned away."""
_MOST_WAITING = 64
"""Beyond so many, the one that has been here longest is turned away."""


class Entrance:
    """Listeners, and the connections that have not yet said who they are."""

    def __init__(self, listeners: Sequence[socket.socket], secret: bytes, alarm: Alarm) -> None:
        self._listeners, self._secret = listeners, secret
        self._ready = Readiness(listeners, alarm)
        self._said: dict[socket.socket, bytes] = {}
        self._since: dict[socket.socket, float] = {}

    def admit(self, deadline: float | None) -> Iterator[tuple[tuple[int, int], socket.socket]]:
        """Wait until somebody connects or speaks; yield rank and number of those who know the
        secret.

        Raises:
            TimeoutError: nobody does, by `deadline`.
            PeerError: a process has failed.
            ConnectionError: no connection can be accepted any more.
        """
        self._ready.wait(deadline)
        for listener in self._listeners:
            self._open(listener)
        for connection in list(self._said):
            yield from self._hear(connection)
        late = [c for c, since in self._since.items() if time.monotonic() - since > _HELLO_S]
        for connection in [*late, *list(self._since)[: max(0, len(self._since) - _MOST_WAITING)]]:
            self._turn_away(connection)

    def _open(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            raise ConnectionError(f"no connection can be accepted: {error}") from error
        connection.setblocking(False)
        self._said[connection], self._since[connection] = b"", time.monotonic()
        self._ready.add(connection)

    def _hear(self, connection: socket.socket) -> Iterator[tuple[tuple[int, int], socket.socket]]:
        said = self._said[connection]
        try:
            more = connection.recv(HELLO.size - len(said))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        self._said[connection] = said + more
        if len(said + more) < HELLO.size and more:
            return
        secret, rank, number = HELLO.unpack((said + more).ljust(HELLO.size, b"\0"))
        if not more or not hmac.compare_digest(secret, self._secret):
            self._turn_away(connection)
            return
        self._forget(connection)
        yield (rank, number), connection

    def _turn_away(self, connection: socket.socket) -> None:
        if connection in self._said:
            self._forget(connection)
            connection.close()

    def _forget(self, connection: socket.socket) -> None:
        del self._said[connection], self._since[connection]
        self._ready.drop(connection)

    def close(self) -> None:
        """Close the listeners, and turn everybody away."""
        for connection in list(self._said):
            self._turn_away(connection)
        self._ready.close()
        for listener in self._listeners:
            with suppress(OSError):
                listener.close()
