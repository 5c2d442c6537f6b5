"""torch's modes of a thread, which a model may set in its own way around its blocks."""

from typing import NamedTuple

import torch


class Modes(NamedTuple):
    """Whether gradients are recorded, the default type, and autocast on CPUs and GPUs."""

    with_grad: bool
    default: torch.dtype
    is_cpu_cast: bool
    cpu_dtype: torch.dtype
    is_cuda_cast: bool
    cuda_dtype: torch.dtype

    @classmethod
    def now(cls) -> "Modes":
        """Note them."""
        return cls(
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
        )

    def put_back(self) -> None:
        """Set them as they were noted."""
        if self == Modes.now():
            return
        torch.set_grad_enabled(self.with_grad)
        torch.set_default_dtype(self.default)
        torch.set_autocast_enabled("cpu", self.is_cpu_cast)
        torch.set_autocast_dtype("cpu", self.cpu_dtype)
        torch.set_autocast_enabled("cuda", self.is_cuda_cast)
        torch.set_autocast_dtype("cuda", self.cuda_dtype)
