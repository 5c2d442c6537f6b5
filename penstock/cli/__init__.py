"""The command line, and the helpers of packages that add a command by `penstock.commands`."""

from penstock.trace.progress import say

from .options import (
    launch,
    num_processes_option,
    refuse_inside_torchrun,
    require_torch,
    set_option,
)

__all__ = [
    "launch",
    "num_processes_option",
    "refuse_inside_torchrun",
    "require_torch",
    "say",
    "set_option",
]
