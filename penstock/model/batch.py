"""Split a batch into micro-batches; `batch_entries` finds the values with samples."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import Any

import numpy
import torch
from torch import Tensor

from penstock.errors import BatchError

from .batch_entries import entries_of, is_entry, is_whole, value_in
from .pytree import Leaf, Structure, flatten, flatten_by, unflatten


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A flattened batch: its entries, their structure, and N, the number of samples."""

    entries: Sequence[Any]
    structure: Structure
    num_samples: int

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, also those inside entries."""
        return [tensor for entry in self.entries for tensor in flatten(entry)[0]]

    def split(self, sizes: Sequence[int]) -> list[Any]:
        """Split values with one entry per sample; repeat all others.  `sizes` add up to N.

        Parts of tensors are detached views, which require grad if their tensor does.
        """
        pieces = [_pieces(entry, sizes) for entry in self.entries]
        return [
            unflatten(self.structure, [parts[n] for parts in pieces]) for n in range(len(sizes))
        ]


def batch_size(value: Any, what: str, elsewhere: int | None = None) -> int:
    """Return N, the number of samples of a batch; it raises as `flat_batch` does."""
    return flat_batch(value, what, elsewhere).num_samples


def flat_batch(value: Any, what: str, elsewhere: int | None = None) -> FlatBatch:
    """Flatten a batch, in which every tensor, array and list has the same number of samples.

    `elsewhere` is N if it is known from another value, such as the inputs of these targets.

    Raises:
        BatchError: there is none of these, their numbers differ, or N is 0; a tensor in a `Whole`,
            without dimensions or in an entry of a list requires grad; or a list has N entries that
            all hold tensors of N rows.
    """
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
    if is_dense and value.dim() and len(value):  # its rows are the samples
        return FlatBatch([value], Leaf(0), len(value))
    return FlatBatch(*entries_of(value, what, elsewhere))


def check_values(tensors: Iterable[Tensor], what: str, *, meta_is_fine: bool = False) -> None:
    """Raise BatchError for tensors without values: meta tensors and fake tensors."""
    for tensor in tensors:
        if _is_fake(tensor) or (tensor.is_meta and not meta_is_fine):
            made = "made under FakeTensorMode" if _is_fake(tensor) else "on the meta device"
            raise BatchError(
                f"{what} hold a tensor of shape {tuple(tensor.shape)} {made}, which has no "
                "values, and the model is run on them. Give tensors with values (torch.zeros and "
                "the like will do for an example), made outside of such a mode"
            )


def _is_fake(tensor: Tensor) -> bool:
    """Tell whether a tensor was made under FakeTensorMode, whose class has no public name."""
    kinds = type(tensor).__mro__
    return any(k.__name__ == "FakeTensor" and k.__module__.startswith("torch.") for k in kinds)


def of_size(value: Any, size: int, what: str) -> Any:
    """Return the first `size` samples; repeat them if there are fewer; BatchError if no batch."""
    batch = flat_batch(value, what)
    count = batch.num_samples
    if size <= count:
        return batch.split([size, count - size])[0]
    return samples(value, [n % count for n in range(size)], what)


def samples(value: Any, numbers: Sequence[int], what: str) -> Any:
    """Return the samples with these numbers, in this order; BatchError if `value` is no batch."""
    batch = flat_batch(value, what)
    return unflatten(batch.structure, [_again(entry, numbers) for entry in batch.entries])


def undeclared(value: Any) -> Any:
    """Replace every `Whole` and `PerSample` by the value in it."""
    entries, structure = flatten_by(value, is_entry)
    return unflatten(structure, [value_in(entry) for entry in entries])


def _pieces(entry: Any, sizes: Sequence[int]) -> list[Any]:
    if isinstance(entry, Tensor) and entry.dim():
        parts = list(entry.detach().split(list(sizes)))
        return [part.requires_grad_() for part in parts] if entry.requires_grad else parts
    if is_whole(entry):
        return [value_in(entry)] * len(sizes)
    entry = value_in(entry)
    bounds = pairwise(accumulate(sizes, initial=0))
    if isinstance(entry, deque):  # a deque has no slices
        return [type(entry)(islice(entry, *bound), entry.maxlen) for bound in bounds]
    return [entry[start:end] for start, end in bounds]


def _again(entry: Any, numbers: Sequence[int]) -> Any:
    if is_whole(entry):
        return value_in(entry)
    if isinstance(entry, Tensor):
        rows = entry.detach()[torch.tensor(numbers, device=entry.device)]
        return rows.requires_grad_(entry.requires_grad)
    entry = value_in(entry)
    if isinstance(entry, numpy.ndarray):
        return entry[numbers]
    entries = [entry[n] for n in numbers]
    return entries if isinstance(entry, range) else type(entry)(entries)
