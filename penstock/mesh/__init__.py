"""WHO TAKES PART: the processes of a job, where each stands, and how they keep in touch."""

from .init import init_mesh
from .mesh import Mesh

__all__ = ["Mesh", "init_mesh"]
