"""Find the values of a batch with one entry per sample.

a tensor, a NumPy array                    dimension 0 counts the samples
a list or deque without tensors or arrays  one entry per sample, whatever the entries are
a tuple of plain values, a range           one entry per sample
a list of N values of other sizes          one entry per sample, if N is known from elsewhere
PerSample(list)                            one entry per sample, whatever the entries are

a number, a string, None, an object        the same for every sample
a tensor or array without dimensions       the same for every sample
Whole(value)                               the same for every sample, whatever it is

any other list, tuple, dict or dataclass   a container of such values
another collection of N entries            ambiguous: refused
a list of N values with N rows each        ambiguous: refused; a tuple is a container
"""

from collections import UserString, deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from enum import Enum
from functools import partial
from operator import length_hint
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from penstock.errors import BatchError

from .open_containers import opened
from .pytree import Sealed, Structure, constants, flatten, flatten_by

_SCALARS = (str, int, float, bool, type(None))
_MEANT_AS_ONE = (
    *(str, UserString, bytes, bytearray, memoryview, set, frozenset, Enum, type),
    *(torch.Size, nn.Module, Sealed, numpy.ndarray),
)
"""Types whose entries never belong to samples; an array here has no dimensions."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A value of a batch that every micro-batch gets whole.

    pipe.train_step({"image": images, "size": penstock.Whole((224, 224))}, labels)
    """

    value: Any


@dataclass(frozen=True, slots=True)
class PerSample:
    """A list or deque of a batch with one entry per sample, also if entries hold tensors.

    pipe.train_step({"pixel_values": images, "labels": penstock.PerSample(boxes_and_classes)})
    """

    entries: Any

    def __len__(self) -> int:
        return len(self.entries)


def entries_of(value: Any, what: str, elsewhere: int | None) -> tuple[list[Any], Structure, int]:
    """Return the entries of a batch, their structure and N; raise as `flat_batch` does."""
    # 1. Take the batch apart into entries with rows, and values that are repeated whole.
    known = _num_beside_lists(value) if elsewhere is None else elsewhere
    entries, structure = flatten_by(value, partial(is_entry, count=known))
    rows = [entry for entry in entries if not is_whole(entry)]
    _check_shared(rows, list(filter(is_whole, entries)), what)
    if not rows:
        raise BatchError(
            f"{what} hold no tensor, no array and no list with one entry per sample, so there is "
            f"no batch to cut; got {type(value).__name__}"
        )
    # 2. The tensors say how many samples there are, or else the first list.
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
    # 3. Refuse other lengths, and values whose entries may or may not belong to the samples.
    _check_lengths(rows, count, what)
    if count == 0:
        shape = f" (shape {tuple(tensors[0].shape)})" if tensors else ""
        raise BatchError(f"the {what} are an empty batch{shape}; give at least one sample")
    _check_objects(constants(structure), count, what)
    _check_lists(value, count, what)
    return entries, structure, count


def value_in(entry: Any) -> Any:
    """Return the value in a `Whole` or `PerSample`; return other values unchanged."""
    if isinstance(entry, PerSample):
        return entry.entries
    return entry.value if isinstance(entry, Whole) else entry


def _num_beside_lists(value: Any) -> int | None:
    """Count the samples by the values outside lists of tensors, or else in the outermost lists.

    The result is None if their numbers differ.
    """
    level = [value]
    while level:
        leaves = [leaf for part in level for leaf in flatten_by(part, _is_entry_or_list)[0]]
        lists = [leaf for leaf in leaves if not isinstance(leaf, Tensor) and not is_entry(leaf)]
        sizes = {_num_rows(x) for x in leaves if all(x is not part for part in lists)} - {None}
        if sizes:
            return sizes.pop() if len(sizes) == 1 else None
        level = [part for opened_list in lists for part in opened_list]
    return None


def is_whole(entry: Any) -> bool:
    """Tell whether every micro-batch gets an entry whole: a `Whole`, or a tensor without rows."""
    return isinstance(entry, Whole) or (isinstance(entry, Tensor) and entry.dim() == 0)


def _is_entry_or_list(value: Any) -> bool:
    return isinstance(value, list | deque) or is_entry(value)


def _num_rows(entry: Any) -> int | None:
    """Count the samples of an entry; None if it is not split."""
    return None if is_whole(entry) else len(entry)


def _fits(value: Any, count: int) -> bool:
    """Tell whether all entries of a value that are split have `count` samples."""
    entries = flatten_by(value, partial(is_entry, count=count))[0]
    return all(_num_rows(entry) in (None, count) for entry in entries)


def is_entry(value: Any, count: int | None = None) -> bool:
    """Tell whether a value, other than a tensor, has one entry per sample or is repeated whole.

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
        return len(value) == count and not all(_fits(part, count) for part in value)
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


def _check_lengths(rows: Sequence[Any], count: int, what: str) -> None:
    for row in rows:
        if len(row) != count:
            entry = value_in(row)
            kind = "an array" if isinstance(entry, numpy.ndarray) else f"a {type(entry).__name__}"
            raise BatchError(
                f"the {what} hold {count} samples and {kind} of {len(row)} entries. An array, a "
                "range, a tuple of plain values, and a list or deque without tensors hold one "
                "entry per sample, and are cut like tensors. Give a value that every micro-batch "
                "is to have as it is as penstock.Whole(value), and several values for each sample "
                "as a dict of them"
            )


def _check_objects(values: Iterable[Any], count: int, what: str) -> None:
    """Refuse a collection that may have one entry per sample, and an iterator."""
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
    """Refuse lists of N entries with N rows each: samples may be the entries or the rows."""
    if count == 1 or isinstance(value, Tensor) or is_entry(value, count):
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
    """Tell whether a value is an iterable collection, and not a single value such as a string."""
    runs = isinstance(value, Iterable) or hasattr(type(value), "__getitem__")
    return runs and isinstance(value, Sized) and not isinstance(value, _MEANT_AS_ONE)


def _check_shared(rows: Sequence[Any], shared: Sequence[Any], what: str) -> None:
    """Refuse shared tensors, and tensors in entries of lists, that require grad."""
    cut = {id(row) for row in rows}
    for row in rows:
        entry = value_in(row)
        if isinstance(entry, list | deque) and any(t.requires_grad for t in flatten(entry)[0]):
            raise BatchError(
                f"a {type(entry).__name__} of the {what} with one entry per sample holds a tensor "
                "that requires grad; give tensor.detach(), or all of them as one tensor"
            )
    for tensor in (leaf for whole in shared for leaf in flatten(value_in(whole))[0]):
        if tensor.requires_grad or id(tensor) in cut:
            raise BatchError(
                f"a tensor of shape {tuple(tensor.shape)} that every micro-batch of the {what} "
                "is given (in a penstock.Whole, or without dimensions) requires grad, or is in "
                "the batch a second time; give tensor.detach(), or make it a parameter of the "
                "layer that uses it"
            )
