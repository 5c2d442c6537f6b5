"""torch's modes of a thread, which a model may set in its own way around its blocks."""

from dataclasses import dataclass

import torch

_KINDS = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Modes:
    """Whether gradients are recorded, the default type, and autocast by kind of device."""

    with_grad: bool
    default: torch.dtype
    autocasts: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> "Modes":
        """Note them."""
        return cls(
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _KINDS),
        )

    def put_back(self) -> None:
        """Set them as they were noted."""
        if self == Modes.now():
            return
        torch.set_grad_enabled(self.with_grad)
        torch.set_default_dtype(self.default)
        for kind, enabled, dtype in self.autocasts:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
