"""How values move between stages, and who runs the programs: one file per transport."""

from penstock.types import Transport

from .base import AbstractTransport, Work
from .loopback import LoopbackTransport
from .threads import ThreadTransport

__all__ = ["AbstractTransport", "LoopbackTransport", "ThreadTransport", "Work", "make_transport"]


def make_transport(transport: Transport, num_threads: int, timeout_s: float) -> AbstractTransport:
    """Make the transport that `transport` names; each rank computes with `num_threads` threads."""
    match transport:
        case Transport.THREADS:
            return ThreadTransport(num_threads, timeout_s)
        case Transport.LOOPBACK:
            return LoopbackTransport(num_threads)
