"""The parameters of a stage, and which version of them a forward has seen."""

from collections.abc import Sequence

from torch import Tensor, nn

from penstock.torch_private import parameters_of, version_counter

Version = list[tuple[int, int, int]]
"""What tells a version of all weights from every other: which they are, how often each was changed
in place, and where it lies: an assigned `.data` moves."""


class Weights:
    """The parameters of a stage's modules, the loss's included.

    There is one version of them at a time, and an update takes the place of the one before.  What
    a forward has seen is asked for by its `Version`: a schedule that lets later forwards see newer
    weights is to keep the older ones here, until no tape needs them.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._holders = all_of(modules)

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters that are here now; each once."""
        return list(dict.fromkeys(p for m in self._modules for p in m.parameters()))

    @property
    def buffers(self) -> list[Tensor]:
        """All buffers that are here now; each once."""
        return list(dict.fromkeys(b for m in self._modules for b in m.buffers()))

    @property
    def newest(self) -> Version:
        """The version that a forward sees now."""
        return [
            (id(p), version_counter(p), p.data_ptr())
            for m in self._holders
            for p in parameters_of(m).values()
            if p is not None
        ]

    def holds(self, version: Version) -> bool:
        """Tell whether what a forward saw is still here, for its recompute and its backward."""
        return version == self.newest


def all_of(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """List modules and all that are inside them; each once."""
    return list(dict.fromkeys(m for root in modules for m in root.modules()))
