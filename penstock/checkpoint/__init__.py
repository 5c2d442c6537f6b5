"""SAVE AND LOAD: a training state as a folder, keyed by the model's own parameter names."""

from .load import load_checkpoint
from .save import export_model, save_checkpoint

__all__ = ["export_model", "load_checkpoint", "save_checkpoint"]
