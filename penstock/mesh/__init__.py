"""WHO TAKES PART: the processes of a job, where each stands, and how they keep in touch."""

from .init import from_rank_0, init_mesh
from .mesh import Mesh
from .start import num_processes

__all__ = ["Mesh", "from_rank_0", "init_mesh", "num_processes"]
