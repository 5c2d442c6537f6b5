"""Save and load a training state as a folder, keyed by the model's own parameter names."""

from .files import remove_checkpoint, remove_unfinished
from .load import load_checkpoint
from .pretrained.load import load_pretrained
from .pretrained.save import save_pretrained
from .reader import CheckpointReader
from .save import async_save_checkpoint, export_model, save_checkpoint
from .together import Saving

__all__ = [
    "CheckpointReader",
    "Saving",
    "async_save_checkpoint",
    "export_model",
    "load_checkpoint",
    "load_pretrained",
    "remove_checkpoint",
    "remove_unfinished",
    "save_checkpoint",
    "save_pretrained",
]
