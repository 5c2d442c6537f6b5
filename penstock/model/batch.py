"""Find the values of a batch that hold one entry per sample, and split them into micro-batches.

a tensor, a NumPy array                    dimension 0 counts the samples
a list or deque without tensors or arrays  one entry per sample, whatever the entries are
a tuple of plain values, a range           one entry per sample
any other of these, a dict, a dataclass    holds such values, and is no value itself
a number, a string, None, an object        the same for every sample
a tensor or array without dimensions       likewise
another collection of as many entries      refused: it may be meant either way
a list of N values with N rows each        refused likewise; a tuple of them holds them
a list of N values of other sizes          one entry per sample, if N is known from elsewhere
PerSample(list)                            one entry per sample, whatever the entries are
Whole(value)                               the same for every sample, whatever it is
"""

from collections import UserString, deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import accumulate, islice, pairwise
from operator import length_hint
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from penstock.errors import BatchError

from .open_containers import opened
from .pytree import Sealed, Structure, constants, flatten, flatten_by, unflatten

_SCALARS = (str, int, float, bool, type(None))
_MEANT_AS_ONE = (
    *(str, UserString, bytes, bytearray, memoryview, set, frozenset, Enum, type),
    *(torch.Size, nn.Module, Sealed, numpy.ndarray),
)
"""Types of values with entries that are not those of samples; an array here has no dimensions."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A value in a batch that every micro-batch is given as it is, not cut into its entries.

    pipe.train_step({"image": images, "size": penstock.Whole((224, 224))}, labels)
    """

    value: Any


@dataclass(frozen=True, slots=True)
class PerSample:
    """A list or deque in a batch with one entry per sample, whatever tensors the entries hold.

    pipe.train_step({"pixel_values": images, "labels": penstock.PerSample(boxes_and_classes)})
    """

    entries: Any

    def __len__(self) -> int:
        return len(self.entries)


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A batch that was flattened: entries in a structure, and N of the entries that are cut."""

    entries: Sequence[Any]
    structure: Structure
    num_samples: int

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, those inside of entries too."""
        return [tensor for entry in self.entries for tensor in flatten(entry)[0]]

    def split(self, sizes: Sequence[int]) -> list[Any]:
        """Cut the batch as `split` does; the sizes are those of all its samples."""
        pieces = [_pieces(entry, sizes) for entry in self.entries]
        return [
            unflatten(self.structure, [parts[n] for parts in pieces]) for n in range(len(sizes))
        ]


def batch_size(value: Any, what: str, elsewhere: int | None = None) -> int:
    """Return N, the number of samples of a batch; raise what `flat_batch` raises."""
    return flat_batch(value, what, elsewhere).num_samples


def flat_batch(value: Any, what: str, elsewhere: int | None = None) -> FlatBatch:
    """Flatten a batch, in which every tensor, array and list has the same number of samples.

    `elsewhere` is the number that is known from what belongs to it: the inputs of targets.

    Raises:
        BatchError: there is none of these, numbers differ, N is 0, a tensor in a `Whole`, without
            dimensions or in an entry of a list requires grad, or a list has N entries
            that all hold tensors of N rows.
    """
    known = _num_beside_lists(value) if elsewhere is None else elsewhere
    entries, structure = flatten_by(value, partial(_is_entry, count=known))
    rows = [entry for entry in entries if not _is_whole(entry)]
    _check_shared(rows, list(filter(_is_whole, entries)), what)
    if not rows:
        raise BatchError(
            f"{what} hold no tensor, no array and no list with one entry per sample, so there is "
            f"no batch to cut; got {type(value).__name__}"
        )
    tensors = [row for row in rows if isinstance(row, Tensor)]
    if any(tensor.is_nested or tensor.layout is not torch.strided for tensor in tensors):
        raise BatchError(
            f"{what} hold a sparse or nested tensor, which cannot be cut into micro-batches. Give "
            "tensor.to_dense() or nested.to_padded_tensor(0), or a value that every micro-batch "
            "is to have as it is as penstock.Whole(tensor)"
        )
    sizes = sorted({len(tensor) for tensor in tensors})
    if len(sizes) > 1:
        raise BatchError(
            f"tensors in the {what} have different batch sizes {sizes} in dimension 0. Stack what "
            "belongs to the samples into one tensor, or give it as penstock.PerSample(list) with "
            "one entry per sample; give what all micro-batches are to have as "
            "penstock.Whole(tensor)"
        )
    count = len(tensors[0] if tensors else rows[0])
    _check_lengths(rows, count, what)
    if count == 0:
        shape = f" (shape {tuple(tensors[0].shape)})" if tensors else ""
        raise BatchError(f"the {what} are an empty batch{shape}; give at least one sample")
    _check_objects(constants(structure), count, what)
    _check_lists(value, count, what)
    return FlatBatch(entries, structure, count)


def check_values(tensors: Iterable[Tensor], what: str, *, meta_is_fine: bool = False) -> None:
    """Refuse tensors without values: those on the meta device, and fake ones.

    Raises:
        BatchError: there is one.
    """
    for tensor in tensors:
        if _is_fake(tensor) or (tensor.is_meta and not meta_is_fine):
            made = "made under FakeTensorMode" if _is_fake(tensor) else "on the meta device"
            raise BatchError(
                f"{what} hold a tensor of shape {tuple(tensor.shape)} {made}, which has no "
                "values, and the model is run on them. Give tensors with values (torch.zeros and "
                "the like will do for an example), made outside of such a mode"
            )


def _is_fake(tensor: Tensor) -> bool:
    """Tell whether it was made under FakeTensorMode, whose class has no public name."""
    kinds = type(tensor).__mro__
    return any(k.__name__ == "FakeTensor" and k.__module__.startswith("torch.") for k in kinds)


def split(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut what holds one entry per sample into parts of the given sizes; repeat everything else.

    Parts of tensors are views, detached, which remember whether their tensor requires grad.
    """
    entries, structure = flatten_by(value, partial(_is_entry, count=sum(sizes)))
    return FlatBatch(entries, structure, sum(sizes)).split(sizes)


def of_size(value: Any, size: int, what: str) -> Any:
    """Return the first `size` samples; where there are fewer, these again and again.

    Raises:
        BatchError: there is no batch to take them of.
    """
    batch = flat_batch(value, what)
    count = batch.num_samples
    if size <= count:
        return batch.split([size, count - size])[0]
    return samples(value, [n % count for n in range(size)], what)


def samples(value: Any, numbers: Sequence[int], what: str) -> Any:
    """Return the samples of these numbers, in this order.

    Raises:
        BatchError: there is no batch to take them of.
    """
    batch = flat_batch(value, what)
    return unflatten(batch.structure, [_again(entry, numbers) for entry in batch.entries])


def undeclared(value: Any) -> Any:
    """Replace every `Whole` and `PerSample` by the value in it."""
    entries, structure = flatten_by(value, _is_entry)
    return unflatten(structure, [_value(entry) for entry in entries])


def _value(entry: Any) -> Any:
    if isinstance(entry, PerSample):
        return entry.entries
    return entry.value if isinstance(entry, Whole) else entry


def _num_beside_lists(value: Any) -> int | None:
    """Count the samples by what lies outside of lists that hold tensors; where nothing does, by
    what lies in the outermost. None if that has no one number.
    """

    def is_entry_or_list(part: Any) -> bool:
        return isinstance(part, list | deque) or _is_entry(part)

    level = [value]
    while level:
        leaves = [leaf for part in level for leaf in flatten_by(part, is_entry_or_list)[0]]
        lists = [leaf for leaf in leaves if not isinstance(leaf, Tensor) and not _is_entry(leaf)]
        sizes = {_num_rows(x) for x in leaves if all(x is not part for part in lists)} - {None}
        if sizes:
            return sizes.pop() if len(sizes) == 1 else None
        level = [part for opened_list in lists for part in opened_list]
    return None


def _is_whole(entry: Any) -> bool:
    """Tell whether every micro-batch is given an entry as it is: a tensor without dimensions has
    no rows.
    """
    return isinstance(entry, Whole) or (isinstance(entry, Tensor) and entry.dim() == 0)


def _num_rows(entry: Any) -> int | None:
    """Count the samples of what is cut; None where it is not."""
    return None if _is_whole(entry) else len(entry)


def _is_entry(value: Any, count: int | None = None) -> bool:
    """Tell whether a value that is no tensor is repeated whole, or has one entry per sample.

    `count` is the number of samples, if it is known.
    """
    if isinstance(value, Whole | PerSample):
        return True
    if isinstance(value, numpy.ndarray):
        return value.ndim > 0
    if not isinstance(value, list | tuple | deque | range) or isinstance(value, torch.Size):
        return False
    if not value or isinstance(value, range):
        return bool(value)
    if isinstance(value, list | deque):
        if not any(map(_holds_rows, value)):
            return True
        entries = (flatten_by(part, partial(_is_entry, count=count))[0] for part in value)
        rows = (_num_rows(entry) for own in entries for entry in own)
        return len(value) == count and not all(number in (None, count) for number in rows)
    return not hasattr(value, "_fields") and not any(map(_is_part_of_structure, value))


def _is_part_of_structure(value: Any) -> bool:
    if isinstance(value, _SCALARS):
        return False
    if isinstance(value, Tensor | numpy.ndarray | range) or _is_collection(value):
        return True
    return opened(value) is not None


def _holds_rows(value: Any) -> bool:
    if isinstance(value, _SCALARS):
        return False
    if isinstance(value, Tensor | numpy.ndarray | Whole | PerSample):
        return True
    parts = opened(value)
    return parts is not None and any(map(_holds_rows, parts[0]))


def _pieces(entry: Any, sizes: Sequence[int]) -> list[Any]:
    if _is_whole(entry):
        return [_value(entry)] * len(sizes)
    if isinstance(entry, Tensor):
        parts = list(entry.detach().split(list(sizes)))
        return [part.requires_grad_() for part in parts] if entry.requires_grad else parts
    entry = _value(entry)
    bounds = pairwise(accumulate(sizes, initial=0))
    if isinstance(entry, deque):  # which has no slices
        return [type(entry)(islice(entry, *bound), entry.maxlen) for bound in bounds]
    return [entry[start:end] for start, end in bounds]


def _again(entry: Any, numbers: Sequence[int]) -> Any:
    """Return the samples of these numbers."""
    if _is_whole(entry):
        return _value(entry)
    if isinstance(entry, Tensor):
        found = entry.detach()[torch.tensor(numbers, device=entry.device)]
        return found.requires_grad_(entry.requires_grad)
    entry = _value(entry)
    if isinstance(entry, numpy.ndarray):
        return entry[numbers]
    rows = [entry[n] for n in numbers]
    return rows if isinstance(entry, range) else type(entry)(rows)


def _check_lengths(rows: Sequence[Any], count: int, what: str) -> None:
    for row in rows:
        if len(row) != count:
            own = _value(row)
            kind = "an array" if isinstance(own, numpy.ndarray) else f"a {type(own).__name__}"
            raise BatchError(
                f"the {what} hold {count} samples and {kind} of {len(row)} entries. An array, a "
                "range, a tuple of plain values, and a list or deque without tensors hold one "
                "entry per sample, and are cut like tensors. Give a value that every micro-batch "
                "is to have as it is as penstock.Whole(value), and several values for each sample "
                "as a dict of them"
            )


def _check_objects(values: Iterable[Any], count: int, what: str) -> None:
    """Refuse a collection that may have one entry per sample, and cannot be known to; likewise
    what the first micro-batch would use up.
    """
    for value in values:
        if count > 1 and isinstance(value, Iterator):
            raise BatchError(
                f"the {what} hold {count} samples, and an iterator of type "
                f"{type(value).__name__}: the first micro-batch would use it up. Give "
                "list(value), or penstock.Whole(list(value)) if every micro-batch is to have all "
                "of it"
            )
        if count > 1 and _is_collection(value) and length_hint(value, -1) == count:
            raise BatchError(
                f"the {what} hold {count} samples, and an object of type {type(value).__name__} "
                f"with {count} entries: every micro-batch would be given all of them. Give "
                "list(value) if it has one entry per sample, so that it is cut like the tensors, "
                "and penstock.Whole(value) if every micro-batch is to have it as it is"
            )


def _check_lists(value: Any, count: int, what: str) -> None:
    """Refuse lists of N entries that all hold tensors of N rows: the entries may be those of the
    samples, and the rows may be.
    """
    if count == 1 or isinstance(value, Tensor) or _is_entry(value, count):
        return
    if (parts := opened(value)) is None:
        return
    is_list = isinstance(value, list | deque) and len(value) == count
    if is_list and all(_holds_rows(x) and not isinstance(x, Whole) for x in value):
        kind, entry = type(value).__name__, type(value[0]).__name__
        raise BatchError(
            f"the {what} hold a {kind} of {count} {entry}s with {count} rows each, and it may be "
            f"meant either way. If each of them belongs to one sample, give "
            f"penstock.PerSample({kind}), or one tensor, torch.stack({kind}); if each has a row "
            f"for every sample, give tuple({kind}), or a dict of them"
        )
    for part in parts[0]:
        _check_lists(part, count, what)


def _is_collection(value: Any) -> bool:
    """Tell whether a value can be run through, entry after entry, and is not meant as one."""
    runs = isinstance(value, Iterable) or hasattr(type(value), "__getitem__")
    return runs and isinstance(value, Sized) and not isinstance(value, _MEANT_AS_ONE)


def _check_shared(rows: Sequence[Any], shared: Sequence[Any], what: str) -> None:
    """Refuse tensors that every micro-batch is given, or in an entry of a list, that a gradient
    would have to come back to.
    """
    cut = {id(row) for row in rows}
    for row in rows:
        own = _value(row)
        if isinstance(own, list | deque) and any(t.requires_grad for t in flatten(own)[0]):
            raise BatchError(
                f"a {type(own).__name__} of the {what} with one entry per sample holds a tensor "
                "that requires grad; give tensor.detach(), or all of them as one tensor"
            )
    for tensor in (leaf for whole in shared for leaf in flatten(_value(whole))[0]):
        if tensor.requires_grad or id(tensor) in cut:
            raise BatchError(
                f"a tensor of shape {tuple(tensor.shape)} that every micro-batch of the {what} "
                "is given (in a penstock.Whole, or without dimensions) requires grad, or is in "
                "the batch a second time; give tensor.detach(), or make it a parameter of the "
                "layer that uses it"
            )
