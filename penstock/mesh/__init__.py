"""The processes of a job: rendezvous, mesh, collectives, deadlines and failures."""

from .init import from_rank_0, init_mesh
from .mesh import Mesh
from .start import num_processes

__all__ = ["Mesh", "from_rank_0", "init_mesh", "num_processes"]
