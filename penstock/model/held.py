"""What a process has of a model: tensors by their names, and modules with extra state."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .extra_state import Owners, find_owners, without_extra


@dataclass(frozen=True, slots=True)
class Held:
    """The tensors of `module`, and extra state of the modules of `original` but for those
    `elsewhere`.

    `original` is the model, whose class may know of other names.
    """

    module: nn.Module
    original: nn.Module
    elsewhere: tuple[str, ...] = ()

    @property
    def owners(self) -> Owners:
        """The modules with extra state that this process runs."""
        return find_owners(self.original, self.elsewhere)

    def state(self, *, keep_vars: bool = False) -> dict[str, Any]:
        """Return the state dict without extra state; of a captured model, tensors whose values
        another process has are there too, on the meta device.
        """
        return without_extra(self.module.state_dict(keep_vars=keep_vars), self.original)

    def state_here(self, *, keep_vars: bool = False) -> dict[str, Any]:
        """Return `state` without the tensors whose values another process has."""
        state = self.state(keep_vars=keep_vars)
        return {n: v for n, v in state.items() if not (isinstance(v, Tensor) and v.is_meta)}

    def own_tensors(self) -> dict[tuple[str, ...], Tensor]:
        """Return the tensors of `state_here`, each by all its names."""
        names: dict[int, list[str]] = {}
        state = self.state_here(keep_vars=True)
        own = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        for name, tensor in own.items():
            names.setdefault(id(tensor), []).append(name)
        return {tuple(alike): own[alike[0]] for alike in names.values()}
