"""WHAT IT STARTS FROM: a folder of safetensors files, of which each process reads its own part."""

from .folder import Folder
from .load import load, load_and_tell

__all__ = ["Folder", "load", "load_and_tell"]
