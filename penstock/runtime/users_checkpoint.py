"""See that code runs inside an activation checkpoint of the user's own.

What does (torch.utils.checkpoint, or a torch.autograd.Function that works like it) runs a second
time in the backward pass, where random numbers are not keyed and BatchNorm's moments are not
wanted.
"""

from typing import Any

import torch

from penstock.torch_private import saving_hooks

AutogradMode = tuple[bool, Any]


def autograd_mode() -> AutogradMode:
    """Say how autograd records now.  Inside a checkpoint it does so otherwise than around it."""
    return torch.is_grad_enabled(), saving_hooks()
