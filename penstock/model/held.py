"""What a process has of a model: tensors by their names, and modules with extra state."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .extra_state import Owners, find_owners, without_extra


@dataclass(frozen=True, slots=True)
class Held:
    """The tensors of `module`, and extra state of the modules of `original` but for those
    `elsewhere`.

    `original` is the model, whose class may know of other names.  Where this process has only a
    part (`is_part`), tensors without memory are those of other processes.
    """

    module: nn.Module
    original: nn.Module
    elsewhere: tuple[str, ...] = ()
    is_part: bool = False

    @property
    def owners(self) -> Owners:
        """The modules with extra state that this process runs."""
        return find_owners(self.original, self.elsewhere)

    def state(self, *, keep_vars: bool = False) -> dict[str, Any]:
        """Return the state dict without extra state, and without tensors of other processes."""
        state = without_extra(self.module.state_dict(keep_vars=keep_vars), self.original)
        if not self.is_part:
            return state
        return {n: v for n, v in state.items() if not (isinstance(v, Tensor) and v.is_meta)}

    def own_tensors(self) -> dict[tuple[str, ...], Tensor]:
        """Return the tensors of `state`, each by all its names."""
        names: dict[int, list[str]] = {}
        state = self.state(keep_vars=True)
        own = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        for name, tensor in own.items():
            names.setdefault(id(tensor), []).append(name)
        return {tuple(alike): own[alike[0]] for alike in names.values()}
