"""WHAT IT STARTS FROM: a folder of safetensors files, of which each process reads its own part."""

from .folder import Folder
from .load import Model, load, load_and_tell

__all__ = ["Folder", "Model", "load", "load_and_tell"]
