"""Close connections in forked children, such as a DataLoader's workers.

A child that holds its parent's connections keeps them open when the parent is killed, so that
nobody would see that it is gone.
"""

import os
import socket
from functools import cache
from weakref import WeakSet

_CONNECTIONS: "WeakSet[socket.socket]" = WeakSet()


def close_in_children(connection: socket.socket) -> None:
    """Let processes that are forked from this one close `connection` at once."""
    _register()
    _CONNECTIONS.add(connection)


@cache
def _register() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for connection in list(_CONNECTIONS):
        connection.close()
