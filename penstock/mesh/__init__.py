"""WHO TAKES PART: the processes of a job, where each stands, and how they keep in touch."""

from .mesh import Mesh, init_mesh

__all__ = ["Mesh", "init_mesh"]
