"""What gives a tensor of the model its values: one of the folder, or what is made of several."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Read = Callable[[str], Tensor]
"""The name of a tensor in the folder -> the tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Tensors of the folder, and what they are in the model: `make(read)[name in the model]`."""

    names: tuple[str, ...]
    make: Callable[[Read], dict[str, Tensor]]


def as_it_is(name: str, known_as: str) -> Source:
    """Return a tensor under another name."""
    return Source((name,), lambda read: {known_as: read(name)})
