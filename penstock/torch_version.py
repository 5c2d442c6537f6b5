"""Refuse a torch that Penstock does not work with, in one line, before the rest imports it."""

import re

from penstock.errors import OLDEST_TORCH, TorchError


def require_torch() -> None:
    """Import torch, and see that it is new enough and has what Penstock needs.

    Raises:
        TorchError: it is too old, or lacks a private name; says which versions work.
    """
    import torch

    version = torch.__version__
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_TORCH:
        raise TorchError(f"torch {version} is installed")
    import penstock.torch_private  # noqa: F401 - for what it raises
