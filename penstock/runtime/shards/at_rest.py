"""What a process keeps of its weights between steps, and what a checkpoint sees of them.

    between steps   S(0)       slices of the weight, its gradient, and its optimizer's state
    in a step       I, R       the whole: gathered once at the beginning; the gradient, summed
                               once at the end, is sliced

That is the first stage of ZeRO (Rajbhandari et al. 2020, section 5.1), along the replicas as along
the axes of shards.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from penstock.model.materialize import has_memory
from penstock.sharding.layouts import I, Layout, S, Slice, shrunk

from .convert import convert
from .sizes import size_like

if TYPE_CHECKING:
    from penstock.mesh.collectives import Collectives

    Axes = Sequence[Collectives]

_BUCKET_BYTES = 25 << 20


class Cut(NamedTuple):
    """A weight that is cut: its layout at rest, along which axes, and its whole shape."""

    layout: Layout
    axes: "Axes"
    shape: tuple[int, ...]

    @property
    def whole(self) -> Layout:
        """The layout in which each device has all of it."""
        return (I,) * len(self.axes)

    @property
    def own(self) -> Slice:
        """What this device has of it."""
        offsets, lengths = [0] * len(self.shape), list(self.shape)
        for state, axis in zip(self.layout, self.axes, strict=True):
            if isinstance(state, S):
                offsets[state.dim] += sum(state.sizes[: axis.rank])
                lengths[state.dim] = state.sizes[axis.rank]
        return Slice(tuple(offsets), tuple(lengths), self.shape)


def keep_slices(weights: Mapping[Tensor, Cut]) -> None:
    """Keep the own slice of each weight only; each parameter stays the same object.

    So it is with gradients of theirs that are there already.
    """
    with torch.no_grad():
        for weight, cut in weights.items():
            if not cut.own.is_all:  # a view would hold the whole's memory
                gradient, weight.grad = weight.grad, None  # left from before, it is added to
                weight.data = _copied(weight.data[cut.own.indices])
                weight.grad = None if gradient is None else _copied(gradient[cut.own.indices])


def _copied(part: Tensor) -> Tensor:
    return part.clone(memory_format=torch.contiguous_format)


class Gathered:
    """Weights that are cut between steps along axes along which calls have the whole.

    `cut` are their layouts at rest, along `axes`, the replicas last.
    """

    def __init__(self, axes: "Axes") -> None:
        self._axes = axes
        self.cut: dict[Tensor, Cut] = {}
        self._in_step: dict[Tensor, Layout] = {}
        self._strides: dict[Tensor, tuple[int, ...]] = {}  # kernels round as memory lies

    def add(self, weights: Iterable[Tensor], cut: Mapping[Tensor, Cut]) -> dict[Tensor, Cut]:
        """Add whole weights, of which calls have what `cut` says; return those that are cut."""
        axes, added = self._axes, dict[Tensor, Cut]()
        for weight in weights:
            own = cut.get(weight)
            shape = tuple(weight.shape) if own is None else own.shape
            layout = () if own is None else own.layout
            in_step = (*layout, *(I,) * (len(axes) - len(layout)))
            rest = shrunk(in_step, shape, [axis.size for axis in axes])
            if rest != in_step:
                added[weight] = Cut(size_like(rest, shape, in_step, axes), axes, shape)
                self._in_step[weight] = in_step
                if own is None and not weight.is_contiguous() and has_memory(weight):
                    self._strides[weight] = weight.stride()
        self.cut |= added
        return added

    @contextmanager
    def for_step(self) -> Iterator[None]:
        """Let weights be as calls have them; keep the own slices of their gradients afterwards."""
        slices = {weight: weight.data for weight in self.cut}
        shapes = {}
        try:
            self._gather()
            shapes = {weight: weight.shape for weight in self.cut}
            yield
        finally:
            for weight, own in slices.items():
                weight.data = own
            for weight, own in slices.items():
                gradient = weight.grad
                if gradient is not None and gradient.shape == shapes.get(weight) != own.shape:
                    rest = self.cut[weight].layout
                    weight.grad = None
                    weight.grad = convert(gradient, self._in_step[weight], rest, self._axes)

    def _gather(self) -> None:
        for number in reversed(range(len(self._axes))):
            held = [
                weight
                for weight, cut in self.cut.items()
                if isinstance(cut.layout[number], S) and self._in_step[weight][number] is I
            ]
            for bucket in cut_into_buckets(held):
                self._gather_along(number, bucket)
        for weight, strides in self._strides.items():
            own = weight.data
            lies = torch.empty_strided(own.shape, strides, dtype=own.dtype, device=own.device)
            weight.data = lies.copy_(own)

    def _gather_along(self, number: int, weights: Sequence[Tensor]) -> None:
        """Send all slices of some weights at once."""
        axis, shapes = self._axes[number], []
        for weight in weights:
            state = self.cut[weight].layout[number]
            assert isinstance(state, S)
            shape = tuple(weight.shape)
            before, after = shape[: state.dim], shape[state.dim + 1 :]
            shapes.append([(*before, length, *after) for length in state.sizes])
        counts = [[torch.Size(of[rank]).numel() for of in shapes] for rank in range(axis.size)]
        flat = torch.cat([weight.data.reshape(-1) for weight in weights])
        rows = axis.all_gather(
            flat, "for the weights that others keep slices of", [[sum(own)] for own in counts]
        )
        parts = [row.split(own) for row, own in zip(rows, counts, strict=True)]
        for place, weight in enumerate(weights):
            state = self.cut[weight].layout[number]
            assert isinstance(state, S)
            pairs = zip(parts, shapes[place], strict=True)
            weight.data = torch.cat([part[place].view(s) for part, s in pairs], state.dim)


def cut_into_buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cut parameters into buckets of one type and device, the last ones first."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in reversed(parameters):
        bucket = kinds.setdefault((parameter.dtype, parameter.device), [])
        bucket.append(parameter)
        if sum(p.numel() * p.element_size() for p in bucket) >= _BUCKET_BYTES:
            yield kinds.pop((parameter.dtype, parameter.device))
    yield from kinds.values()


class CutWeights:
    """What this process holds of weights that are cut, by the name of each."""

    def __init__(self, named: Mapping[str, Tensor], cut: Mapping[Tensor, Cut]) -> None:
        self._weights = cut
        self._cut = {name: cut[weight] for name, weight in named.items() if weight in cut}

    def norms(
        self, weights: Sequence[Tensor], own: Sequence[float], norm_type: float
    ) -> list[float]:
        """Return the p-norms of what belongs to some weights, of those of what is held here.

        All processes that share the weights call this alike.
        """
        norms = torch.tensor(own, dtype=torch.float64)
        axes = dict.fromkeys(axis for cut in self._weights.values() for axis in cut.axes)
        for axis in axes:
            if axis.size == 1:
                continue
            rows = torch.stack(axis.all_gather(norms, "for the gradient norms of the others"))
            is_cut = torch.tensor([_cuts(self._weights.get(w), axis) for w in weights])
            norms = torch.where(is_cut, torch.linalg.vector_norm(rows, norm_type, dim=0), norms)
        return norms.tolist()

    def slices(self, names: Iterable[str], *, of_optimizer: bool = False) -> dict[str, Slice]:
        """Return which part of a tensor is here, of those that are cut like their weight.

        Names are those of weights; those of an optimizer's state end in a dot and what it is.
        """
        found = {name: self._cut.get(weight_of(name, of_optimizer)) for name in names}
        return {name: cut.own for name, cut in found.items() if cut is not None}

    def is_first(self, name: str, axes: "Axes") -> bool:
        """Tell whether this process is the first along `axes` to hold what it has of a weight."""
        return all(axis.rank == 0 for axis in axes if not _cuts(self._cut.get(name), axis))

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Put weights together, or their gradients; all that share them call this alike."""
        found = {}
        for name in sorted(tensors):  # in the same order on each
            found[name], cut = tensors[name], self._cut.get(name)
            if cut is not None and found[name].shape == cut.own.lengths:
                with torch.no_grad():
                    found[name] = convert(found[name], cut.layout, cut.whole, cut.axes)
        return found


def weight_of(key: str, of_optimizer: bool) -> str:
    """Return the name of the weight that a tensor of a model or an optimizer belongs to."""
    return key.rpartition(".")[0] if of_optimizer else key


def _cuts(cut: Cut | None, axis: "Collectives") -> bool:
    """Tell whether a weight is in slices along an axis."""
    if cut is None:
        return False
    return any(a is axis and isinstance(s, S) for a, s in zip(cut.axes, cut.layout, strict=True))
