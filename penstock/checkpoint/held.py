"""What this process has of a model that is saved or loaded."""

from torch import nn

from penstock.model.held import Held
from penstock.optim.pipeline_like import PipelineLike


def held_of(module: nn.Module) -> Held:
    """Return what this process has of a pipeline, or of any module, which it has whole."""
    return module.held if isinstance(module, PipelineLike) else Held(module, module)
