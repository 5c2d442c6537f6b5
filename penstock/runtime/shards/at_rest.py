"""Keep slices of weights between steps, gather them for a step, and show them to checkpoints.

    between steps   S(0)       slices of the weight, its gradient, and its optimizer state
    in a step       I, R       the whole weight, gathered once at the start; its gradient is summed
                               once at the end, and sliced

This is the first stage of ZeRO (Rajbhandari et al. 2020, section 5.1), along replicas and along
the axes of shards.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from penstock.model.materialize import has_memory
from penstock.sharding.layouts import I, Layout, S, Slice, shrunk
from penstock.sharding.plan import BUCKET_BYTES

from .convert import convert, cut_of, shapes_of
from .sizes import size_like, slice_here

if TYPE_CHECKING:
    from penstock.mesh.collectives import Collectives

    Axes = Sequence[Collectives]


class Cut(NamedTuple):
    """The layout of a sliced weight between steps, the axes of it, and its whole shape."""

    layout: Layout
    axes: "Axes"
    shape: tuple[int, ...]

    @property
    def whole(self) -> Layout:
        """The layout in which each device has the whole weight."""
        return (I,) * len(self.axes)

    @property
    def own(self) -> Slice:
        """The slice on this device."""
        return slice_here(self.shape, self.layout, self.axes)


def keep_slices(weights: Mapping[Tensor, Cut]) -> None:
    """Keep only this device's slice of each weight and gradient, in the same parameter objects."""
    with torch.no_grad():
        for weight, cut in weights.items():
            if not cut.own.is_all:  # copy: a view would hold the whole's memory
                gradient, weight.grad = weight.grad, None  # torch refuses a .grad of other shape
                weight.data = _copied(weight.data[cut.own.indices])
                weight.grad = None if gradient is None else _copied(gradient[cut.own.indices])


def _copied(part: Tensor) -> Tensor:
    return part.clone(memory_format=torch.contiguous_format)


class Gathered:
    """Gathers weights for a step along axes that cut them between steps only.

    `cut` has their layouts between steps, along `axes`, the replicas last.
    """

    def __init__(self, axes: "Axes") -> None:
        self._axes = axes
        self.cut: dict[Tensor, Cut] = {}
        self._in_step: dict[Tensor, Layout] = {}
        self._strides: dict[Tensor, tuple[int, ...]] = {}  # kernels round as memory lies

    def add(self, weights: Iterable[Tensor], cut: Mapping[Tensor, Cut]) -> dict[Tensor, Cut]:
        """Add whole weights, in calls laid out as in `cut`; return those that are sliced."""
        axes, added = self._axes, dict[Tensor, Cut]()
        for weight in weights:
            in_call = cut.get(weight)
            shape = tuple(weight.shape) if in_call is None else in_call.shape
            layout = () if in_call is None else in_call.layout
            in_step = (*layout, *(I,) * (len(axes) - len(layout)))
            rest = shrunk(in_step, shape, [axis.size for axis in axes])
            if rest != in_step:
                added[weight] = Cut(size_like(rest, shape, in_step, axes), axes, shape)
                self._in_step[weight] = in_step
                if in_call is None and not weight.is_contiguous() and has_memory(weight):
                    self._strides[weight] = weight.stride()
        self.cut |= added
        return added

    @contextmanager
    def for_step(self) -> Iterator[None]:
        """Gather the weights for a step; afterwards keep this device's slices of the gradients."""
        # `.data` changes the memory of the parameter, so modules and optimizers need no change.
        slices = {weight: weight.data for weight in self.cut}
        shapes = {}
        try:
            self._gather()
            shapes = {weight: weight.shape for weight in self.cut}
            yield
        finally:
            for weight, part in slices.items():
                weight.data = part
            # A gradient of the whole shape is new; one of the slice's shape is from before.
            for weight, part in slices.items():
                gradient = weight.grad
                if gradient is not None and gradient.shape == shapes.get(weight) != part.shape:
                    rest = self.cut[weight].layout
                    weight.grad = None
                    weight.grad = convert(gradient, self._in_step[weight], rest, self._axes)

    def _gather(self) -> None:
        # Later axes cut the slices of earlier ones, so gather along the last axis first.
        for number in reversed(range(len(self._axes))):
            held = [
                weight
                for weight, cut in self.cut.items()
                if isinstance(cut.layout[number], S) and self._in_step[weight][number] is I
            ]
            for bucket in cut_into_buckets(held):
                self._gather_along(number, bucket)
        for weight, strides in self._strides.items():
            whole = weight.data
            strided = torch.empty_strided(
                whole.shape, strides, dtype=whole.dtype, device=whole.device
            )
            weight.data = strided.copy_(whole)

    def _gather_along(self, number: int, weights: Sequence[Tensor]) -> None:
        """Gather the slices of some weights along one axis, in one all-gather."""
        # 1. Compute the shapes of all devices' slices.
        axis, cuts = self._axes[number], [cut_of(self.cut[w].layout[number]) for w in weights]
        shapes = [shapes_of(weight, cut) for weight, cut in zip(weights, cuts, strict=True)]

        # 2. Gather them as one flat tensor per device.
        counts = [[torch.Size(of[rank]).numel() for of in shapes] for rank in range(axis.size)]
        flat = torch.cat([weight.data.reshape(-1) for weight in weights])
        rows = axis.all_gather(
            flat, "for the weights that others keep slices of", [[sum(own)] for own in counts]
        )

        # 3. Put each weight together.
        parts = [row.split(own) for row, own in zip(rows, counts, strict=True)]
        for place, (weight, cut) in enumerate(zip(weights, cuts, strict=True)):
            pairs = zip(parts, shapes[place], strict=True)
            weight.data = torch.cat([part[place].view(s) for part, s in pairs], cut.dim)


def cut_into_buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield buckets of parameters with one dtype and device, the last parameters first."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in reversed(parameters):
        bucket = kinds.setdefault((parameter.dtype, parameter.device), [])
        bucket.append(parameter)
        if sum(p.numel() * p.element_size() for p in bucket) >= BUCKET_BYTES:
            yield kinds.pop((parameter.dtype, parameter.device))
    yield from kinds.values()


class CutWeights:
    """The slices of weights in this process, by name."""

    def __init__(self, named: Mapping[str, Tensor], cut: Mapping[Tensor, Cut]) -> None:
        self._weights = cut
        self._cut = {name: cut[weight] for name, weight in named.items() if weight in cut}

    def norms(
        self, weights: Sequence[Tensor], own: Sequence[float], norm_type: float
    ) -> list[float]:
        """Return the p-norms of whole tensors, one per weight, from the norms of the slices here.

        All processes that share the weights must call this with the same weights.
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
        """Return the slices of sliced tensors here, by name.

        A name is a weight's; one of an optimizer state is "weight.state".
        """
        cuts = {name: self._cut.get(weight_of(name, of_optimizer)) for name in names}
        return {name: cut.own for name, cut in cuts.items() if cut is not None}

    def is_first(self, name: str, axes: "Axes") -> bool:
        """Tell whether this process is the first along `axes` to hold its part of a weight."""
        return all(axis.rank == 0 for axis in axes if not _cuts(self._cut.get(name), axis))

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather whole weights, or gradients; all processes that share them must call this."""
        wholes = {}
        for name in sorted(tensors):  # all processes gather in this order
            wholes[name], cut = tensors[name], self._cut.get(name)
            if cut is not None and wholes[name].shape == cut.own.lengths:
                with torch.no_grad():
                    wholes[name] = convert(wholes[name], cut.layout, cut.whole, cut.axes)
        return wholes


def weight_of(key: str, of_optimizer: bool) -> str:
    """Return the name of the weight of a model's or an optimizer's tensor."""
    return key.rpartition(".")[0] if of_optimizer else key


def _cuts(cut: Cut | None, axis: "Collectives") -> bool:
    if cut is None:
        return False
    return any(a is axis and isinstance(s, S) for a, s in zip(cut.axes, cut.layout, strict=True))
