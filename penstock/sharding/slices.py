"""A part of a tensor, as one device or one file has it."""

from typing import Any, NamedTuple

from torch import Tensor

Shape = tuple[int, ...]


class Slice(NamedTuple):
    """Where a part of a tensor begins and how long it is, by dimension; and the whole's shape."""

    offsets: Shape
    lengths: Shape
    whole: Shape

    @classmethod
    def of_all(cls, shape: Shape) -> "Slice":
        """Return all of a tensor."""
        return cls((0,) * len(shape), shape, shape)

    @property
    def is_all(self) -> bool:
        """Whether it is all of the tensor."""
        return self.lengths == self.whole

    def of(self, whole: Any) -> Tensor:
        """Cut it out of a whole tensor, or of one in a file."""
        ends = zip(self.offsets, self.lengths, strict=True)
        own: Tensor = whole[tuple(slice(a, a + n) for a, n in ends)]
        return own
