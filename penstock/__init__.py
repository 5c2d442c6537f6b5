"""Penstock: train giant neural networks by pipeline parallelism, exact to the bit.

Public names are resolved when first used: what needs no tensors starts at once, without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import schedules as schedules
    from .automatic.parallelize import measure_cluster as measure_cluster
    from .automatic.parallelize import parallelize as parallelize
    from .automatic.parallelize import plan_mesh as plan_mesh
    from .automatic.plan_model import plan as plan
    from .automatic.plan_model import simulate as simulate
    from .automatic.target import Target as Target
    from .checkpoint import CheckpointReader as CheckpointReader
    from .checkpoint import async_save_checkpoint as async_save_checkpoint
    from .checkpoint import export_model as export_model
    from .checkpoint import load_checkpoint as load_checkpoint
    from .checkpoint import load_pretrained as load_pretrained
    from .checkpoint import save_checkpoint as save_checkpoint
    from .checkpoint import save_pretrained as save_pretrained
    from .costs.cluster import Cluster as Cluster
    from .costs.profile import Profile as Profile
    from .equality import CheckReport as CheckReport
    from .equality import check as check
    from .errors import PenstockError as PenstockError
    from .mesh import Mesh as Mesh
    from .mesh import init_mesh as init_mesh
    from .model.batch_entries import PerSample as PerSample
    from .model.batch_entries import Whole as Whole
    from .model.capture.capture import capture as capture
    from .model.layer_list import Layer as Layer
    from .model.layers import Layers as Layers
    from .optim.clip import clip_grad_norm_ as clip_grad_norm_
    from .optim.main_weights import MainWeights as MainWeights
    from .optim.scaler import GradScaler as GradScaler
    from .pipeline import Pipeline as Pipeline
    from .planner.candidates import Constraints as Constraints
    from .planner.parallelism import Parallelism as Parallelism
    from .planner.placement import Placement as Placement
    from .planner.plan import Plan as Plan
    from .runtime.microbatches import microbatch_sizes as microbatch_sizes
    from .runtime.planning import layer_facts as layer_facts
    from .runtime.profiling import profile as profile
    from .runtime.shard import shard as shard
    from .sharding.request import ShardingRequest as ShardingRequest
    from .trace.timeline import Timeline as Timeline
    from .types import CheckBatches as CheckBatches
    from .types import Outputs as Outputs
    from .types import Recompute as Recompute
    from .types import Reduction as Reduction
    from .types import TiedGradients as TiedGradients
    from .types import Trace as Trace
    from .types import Transport as Transport

__version__ = "0.2.0"

_HOME = {
    "CheckBatches": "penstock.types",
    "CheckReport": "penstock.equality",
    "CheckpointReader": "penstock.checkpoint",
    "Cluster": "penstock.costs.cluster",
    "Constraints": "penstock.planner.candidates",
    "GradScaler": "penstock.optim.scaler",
    "Layer": "penstock.model.layer_list",
    "Layers": "penstock.model.layers",
    "MainWeights": "penstock.optim.main_weights",
    "Mesh": "penstock.mesh",
    "Outputs": "penstock.types",
    "Parallelism": "penstock.planner.parallelism",
    "PenstockError": "penstock.errors",
    "PerSample": "penstock.model.batch_entries",
    "Pipeline": "penstock.pipeline",
    "Placement": "penstock.planner.placement",
    "Plan": "penstock.planner.plan",
    "Profile": "penstock.costs.profile",
    "Recompute": "penstock.types",
    "Reduction": "penstock.types",
    "ShardingRequest": "penstock.sharding.request",
    "Target": "penstock.automatic.target",
    "TiedGradients": "penstock.types",
    "Timeline": "penstock.trace.timeline",
    "Trace": "penstock.types",
    "Transport": "penstock.types",
    "Whole": "penstock.model.batch_entries",
    "async_save_checkpoint": "penstock.checkpoint",
    "capture": "penstock.model.capture.capture",
    "check": "penstock.equality",
    "clip_grad_norm_": "penstock.optim.clip",
    "export_model": "penstock.checkpoint",
    "init_mesh": "penstock.mesh",
    "layer_facts": "penstock.runtime.planning",
    "load_checkpoint": "penstock.checkpoint",
    "load_pretrained": "penstock.checkpoint",
    "measure_cluster": "penstock.automatic.parallelize",
    "microbatch_sizes": "penstock.runtime.microbatches",
    "parallelize": "penstock.automatic.parallelize",
    "plan": "penstock.automatic.plan_model",
    "plan_mesh": "penstock.automatic.parallelize",
    "profile": "penstock.runtime.profiling",
    "save_checkpoint": "penstock.checkpoint",
    "save_pretrained": "penstock.checkpoint",
    "shard": "penstock.runtime.shard",
    "simulate": "penstock.automatic.plan_model",
}

_WITHOUT_TORCH = (
    "penstock.costs.profile",
    "penstock.costs.cluster",
    "penstock.errors",
    "penstock.planner.candidates",
    "penstock.automatic.plan_model",
    "penstock.planner.parallelism",
    "penstock.planner.placement",
    "penstock.planner.plan",
    "penstock.sharding.request",
    "penstock.trace.timeline",
    "penstock.types",
)

__all__ = [
    "CheckReport",
    "CheckpointReader",
    "Cluster",
    "Constraints",
    "GradScaler",
    "Layer",
    "Layers",
    "MainWeights",
    "Mesh",
    "Outputs",
    "Parallelism",
    "PenstockError",
    "PerSample",
    "Pipeline",
    "Placement",
    "Plan",
    "Profile",
    "Recompute",
    "Reduction",
    "ShardingRequest",
    "Target",
    "TiedGradients",
    "Timeline",
    "Trace",
    "Transport",
    "Whole",
    "async_save_checkpoint",
    "capture",
    "check",
    "clip_grad_norm_",
    "export_model",
    "init_mesh",
    "layer_facts",
    "load_checkpoint",
    "load_pretrained",
    "measure_cluster",
    "microbatch_sizes",
    "parallelize",
    "plan",
    "plan_mesh",
    "profile",
    "save_checkpoint",
    "save_pretrained",
    "schedules",
    "shard",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name == "schedules":
        return import_module("penstock.schedules")
    if name not in _HOME:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    if _HOME[name] not in _WITHOUT_TORCH:
        import_module("penstock.torch_private")  # or it says which torch it needs
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
