"""SAVE AND LOAD: a training state as a folder, keyed by the model's own parameter names."""

from .load import load_checkpoint
from .save import save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
