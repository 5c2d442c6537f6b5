"""Compare what ranks of a replica are given for a step, before any of them sends a tensor.

Of shards of a stage the shapes are compared at each call.  The values are compared at some, of
every rank that was given any: ranks whose loaders draw for themselves would train on a mixture of
their batches, and nothing would look wrong.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from typing import Any, NamedTuple
from zlib import crc32

import numpy
import torch
from torch import Tensor

from penstock.errors import BatchError, MeshError
from penstock.model.batch import FlatBatch
from penstock.model.pytree import PLAIN_TYPES, constants, flatten
from penstock.types import CheckBatches

from .control import Control

_NUM_FIRST, _EACH = 8, 100
_MOST_ELEMENTS = 4096
_ABSENT = -1.0
"""Stands in a row of floats for what a process has none of: no field is below 0."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


Pair = tuple[FlatBatch | None, FlatBatch | None]
"""Inputs and targets; None for what is not there."""


Ranks = Sequence[Sequence[int]]
"""Those of one replica, stage by stage."""


class Texts(NamedTuple):
    """What inputs and targets are, a line for each tensor; empty for what is not compared.

    `digests` are equal for equal texts; None for none.
    """

    inputs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    digests: tuple[int | None, int | None] = (None, None)

    @classmethod
    def of(cls, inputs: tuple[str, ...], targets: tuple[str, ...]) -> "Texts":
        """Digest both."""
        return cls(inputs, targets, (_digest_of(inputs), _digest_of(targets)))


NOTHING_SAID = Texts()


class BatchCheck:
    """Says what of the batches of one pipeline is compared; counts its calls, as all ranks do."""

    def __init__(self, when: CheckBatches, *, num_shards: int) -> None:
        self._when = when
        self._compares_shapes = num_shards > 1
        self._calls: Counter[str] = Counter()

    def texts(self, kind: str, given: Pair, read: Pair) -> Texts:
        """Describe a batch for call number so many of its `kind`: by its values what was `given`,
        or by its shapes what is `read`; None is neither.
        """
        number = self._calls[kind]
        self._calls[kind] += 1
        if self._looks_at(number):
            return Texts.of(*(_lines(value, with_values=True) for value in given))
        if self._compares_shapes:
            return Texts.of(*(_lines(value, with_values=False) for value in read))
        return NOTHING_SAID

    def _looks_at(self, number: int) -> bool:
        if self._when is CheckBatches.FIRST:
            return number < _NUM_FIRST or number % _EACH == 0
        return self._when is CheckBatches.ALWAYS


@dataclass(frozen=True, slots=True)
class CallHeader:
    """The facts that each process announces before a step, to be compared on all alike.

    `number` counts the calls, `trace` grows with how much is to be recorded.  A number of samples
    is None where none were given, a digest where nothing is compared, and `counted`, by which
    losses are divided, where the batch holds no such number.
    """

    number: int
    trace: int
    num_inputs: int | None
    num_targets: int | None
    inputs_digest: int | None
    targets_digest: int | None
    raw_total: float
    loss_scale: float
    counted: float | None

    def pack(self) -> list[float]:
        """Return the fields in their order, as floats for one all-gather."""
        return [_ABSENT if value is None else float(value) for value in astuple(self)]

    @classmethod
    def unpack(cls, row: Sequence[float]) -> "CallHeader":
        """Read what `pack` wrote: six whole numbers, exact as floats, and three of any kind."""
        found: list[Any] = [None if value == _ABSENT else value for value in row]
        found[:6] = [value if value is None else int(value) for value in found[:6]]
        return cls(*found)


def check_same_call(headers: Sequence[CallHeader]) -> None:
    """See that all processes make the same call.

    Raises:
        MeshError: they do not, or scale the loss differently.
    """
    first = headers[0]
    for rank, header in enumerate(headers):
        if header.number != first.number:
            raise MeshError(
                f"the processes do not do the same: for rank 0 this is call {first.number}, "
                f"for rank {rank} call {header.number}. Every process must make every call, in "
                "the same order (no `if rank == 0` around a step)"
            )
        if header.loss_scale != first.loss_scale:
            raise MeshError(
                f"rank 0 scales its loss by {first.loss_scale:g}, rank {rank} by "
                f"{header.loss_scale:g}; gradients of both would be mixed. Give every process the "
                "same loss_scale: penstock.GradScaler decides it jointly, if every process makes "
                "one, and loads the same state"
            )


def num_samples(
    headers: Sequence[CallHeader], replicas: Sequence[Ranks], readers: Sequence[int]
) -> list[int]:
    """Return N of each replica.  The stages `readers` read the inputs.

    Raises:
        BatchError: its processes were given different batches, or none where one is needed.
    """
    return [_num_samples(headers, replicas, replica, readers) for replica in range(len(replicas))]


def _num_samples(
    headers: Sequence[CallHeader],
    replicas: Sequence[Ranks],
    replica: int,
    readers: Sequence[int],
) -> int:
    stages, of_replica = replicas[replica], f" of replica {replica}" if len(replicas) > 1 else ""
    for reader, rank in ((r, rank) for r in readers for rank in stages[r]):
        if headers[rank].num_inputs is None:
            raise BatchError(
                f"rank {rank} runs stage {reader}{of_replica} and was given no inputs; "
                "give them on every rank, or at least where they are read"
            )
    first, every = stages[readers[0]][0], sorted({*chain.from_iterable(stages)})
    count = headers[first].num_inputs
    assert count is not None
    for rank in every:
        _check_as_many(first, count, rank, headers[rank])
    missing = [rank for rank in stages[-1] if headers[rank].num_targets is None]
    if missing and any(headers[rank].num_targets is not None for rank in every):
        raise BatchError(
            f"rank {missing[0]} runs the last stage{of_replica} and was given no "
            "targets; give them on every rank, or at least there"
        )
    return count


def _check_as_many(first: int, count: int, rank: int, header: CallHeader) -> None:
    if rank == first and header.num_targets not in (None, count):
        raise BatchError(
            f"inputs hold {count} samples, targets {header.num_targets}; dimension 0 of "
            "tensors is the batch, and lists have one entry per sample"
        )
    for what, number in (("inputs", header.num_inputs), ("targets", header.num_targets)):
        if number not in (None, count):
            raise BatchError(
                f"rank {first} was given {count} inputs, rank {rank} {number} {what}; all "
                "ranks of a replica must be given the same mini-batch"
            )


def check_same(
    world: Control,
    replicas: Sequence[Sequence[int]],
    found: Sequence[tuple[int | None, int | None]],
    mine: Texts,
) -> None:
    """See that the ranks of each of `replicas` are given alike; `found` are every rank's digests.

    Raises:
        BatchError: some are not; on every process alike.
    """
    for ranks in replicas:
        for k in range(2):
            given = [rank for rank in ranks if found[rank][k] is not None]
            if len({found[rank][k] for rank in given}) > 1:
                _refuse(world.gather(mine[k], "for what the others were given"), given, k)


def _refuse(said: Sequence[Sequence[str]], ranks: Sequence[int], k: int) -> None:
    """Say where the batches of these ranks differ: in the inputs for a `k` of 0, else the targets.

    Raises:
        BatchError: the first tensor that differs, with what each rank has.
    """
    what, first = ("inputs", "targets")[k], ranks[0]
    places = range(max(len(said[rank]) for rank in ranks))
    of_rank = {rank: dict(enumerate(said[rank])) for rank in ranks}
    place = next(n for n in places if len({of_rank[rank].get(n) for rank in ranks}) > 1)
    by_text: dict[str, list[str]] = {}
    for rank in ranks:
        by_text.setdefault(of_rank[rank].get(place, "nothing"), []).append(str(rank))
    which = what if len(said[first]) == 1 else f"{what} (tensor {place} of {len(said[first])})"
    each = "; ".join(
        f"rank{'s' if len(who) > 1 else ''} {', '.join(who)}: {text}"
        for text, who in by_text.items()
    )
    raise BatchError(
        f"the ranks of a replica were given different {which}: {each}. They work on one "
        "mini-batch together: seed their loaders alike, and give a DistributedSampler the number "
        "of the replica (mesh.replica of mesh.num_replicas), not that of the rank"
    )


def _digest_of(lines: Sequence[str]) -> int | None:
    return crc32("\n".join(lines).encode()) if lines else None


def _lines(batch: FlatBatch | None, *, with_values: bool) -> tuple[str, ...]:
    return () if batch is None else tuple(_each_line(batch, with_values=with_values))


def _each_line(batch: FlatBatch, *, with_values: bool) -> Iterator[str]:
    for tensor in batch.tensors:
        shape = f"{tuple(tensor.shape)} {tensor.dtype}"
        has_values = with_values and tensor.layout is torch.strided and not tensor.is_meta
        yield f"{shape}, digest {_digest(tensor):08x}" if has_values else shape
    structures = [*(flatten(entry)[1] for entry in batch.entries), batch.structure]
    for value in chain.from_iterable(map(constants, structures)) if with_values else ():
        if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
            digest = crc32(value.tobytes())
            yield f"{value.shape} {value.dtype}, digest {digest:08x}"
        elif isinstance(value, PLAIN_TYPES) and value is not None:
            yield repr(value)


def _digest(tensor: Tensor) -> int:
    """Return a number of a tensor's bits: of all integers, else of some at even distances."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if tensor.is_floating_point() or tensor.is_complex():
        flat = flat[:: flat.numel() // _MOST_ELEMENTS | 1]  # an odd distance: not one column only
    words = flat.contiguous().view(_WORDS[tensor.element_size()]).cpu()
    return crc32(words.numpy().tobytes())
