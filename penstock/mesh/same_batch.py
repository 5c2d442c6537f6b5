"""Compare the mini-batches of the ranks of a replica before a step sends any tensor.

Shards of a stage compare shapes at each call.  All ranks compare values at some calls: with
loaders that draw different samples they would train on a mixture, and no error would show it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from itertools import chain
from math import isclose
from typing import Any, NamedTuple
from zlib import crc32

import numpy
import torch
from torch import Tensor

from penstock.errors import BatchError, MeshError, PenstockError
from penstock.model.batch import FlatBatch
from penstock.model.pytree import PLAIN_TYPES, constants, flatten
from penstock.types import CheckBatches

from .control import Control

_NUM_FIRST = 8
"""Calls at the start whose values are compared."""
_EACH = 100
"""Calls between two comparisons after these."""
_MOST_ELEMENTS = 4096
"""Floats of a tensor that its digest reads, about."""
_ALIKE = 1e-3
"""The relative difference that two ranks may find between their gradients of the outputs: they
compute them alike, but perhaps on unlike devices."""
_ABSENT = -1.0
"""None in a row of floats; no field is below 0."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""The integer type with the bytes of an element."""
Pair = tuple[FlatBatch | None, FlatBatch | None]
"""Inputs and targets; None if absent."""
Ranks = Sequence[Sequence[int]]
"""The ranks of one replica, stage by stage."""


class Texts(NamedTuple):
    """Descriptions of inputs and targets, a line per tensor; empty if not compared.

    `digests` are equal for equal texts; None for an empty one.
    """

    inputs: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    digests: tuple[int | None, int | None] = (None, None)

    @classmethod
    def of(cls, batches: Pair, *, with_values: bool) -> "Texts":
        """Describe both, by their values or by their shapes."""
        inputs, targets = (tuple(_lines(batch, with_values=with_values)) for batch in batches)
        digests = [crc32("\n".join(x).encode()) if x else None for x in (inputs, targets)]
        return cls(inputs, targets, (digests[0], digests[1]))


NOTHING_SAID = Texts()
"""Texts of a call at which nothing is compared."""


class BatchCheck:
    """Chooses the calls whose batches are compared; counts calls, alike on all ranks."""

    def __init__(self, when: CheckBatches, *, num_shards: int) -> None:
        self._when = when
        self._compares_shapes = num_shards > 1
        self._calls: Counter[str] = Counter()

    def texts(self, kind: str, batch: Pair, read: Pair) -> Texts:
        """Describe the batch of the next call of this `kind`.

        The text has the values of `batch`, the shapes of `read`, the part that this rank reads, or
        nothing.
        """
        number = self._calls[kind]
        self._calls[kind] += 1
        is_due = self._when is CheckBatches.ALWAYS
        if self._when is CheckBatches.FIRST:
            is_due = number < _NUM_FIRST or number % _EACH == 0
        if is_due:
            return Texts.of(batch, with_values=True)
        return Texts.of(read, with_values=False) if self._compares_shapes else NOTHING_SAID


@dataclass(frozen=True, slots=True)
class CallHeader:
    """Facts that each process announces before a step, compared on all alike.

    `number` counts the calls; `trace` is the level of recording.  The numbers of samples are None
    without a batch, a digest if nothing is compared.  `counted` divides losses; it is None if the
    batch holds no such number.
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
        """Read a row of `pack`: six integers, exact as floats, and three floats."""
        fields: list[Any] = [None if value == _ABSENT else value for value in row]
        fields[:6] = [value if value is None else int(value) for value in fields[:6]]
        return cls(*fields)


@contextmanager
def agreed() -> Iterator[None]:
    """Mark an error about what all processes have told each other: all of them raise it."""
    try:
        yield
    except PenstockError as error:
        error.is_agreed = True
        raise


def check_same_call(headers: Sequence[CallHeader]) -> None:
    """Raise MeshError if processes make different calls, or scale the loss differently."""
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


def check_same_backward(
    rows: Sequence[Sequence[float]], replicas: Sequence[Sequence[int]]
) -> None:
    """Raise MeshError unless all processes begin the backward of the same call, of the same loss.

    A row has the number of the call, whether the rank has the outputs, the sum of the absolute
    gradients of these, and their number.
    """
    numbers = [int(row[0]) for row in rows]
    for rank, number in enumerate(numbers):
        if number != numbers[0]:
            raise MeshError(
                f"rank 0 runs the backward of call {numbers[0]}, rank {rank} that of call "
                f"{number}. Every process must call backward() of the same outputs, in the same "
                "order"
            )
    for ranks in replicas:
        having = [rank for rank in ranks if rows[rank][1]]
        for rank in having[1:]:
            first, other = rows[having[0]][2:4], rows[rank][2:4]
            if first[1] != other[1] or not isclose(first[0], other[0], rel_tol=_ALIKE):
                raise MeshError(
                    f"ranks {having[0]} and {rank} computed different losses: their gradients "
                    f"of the outputs add up to {first[0]:g} and {other[0]:g}. Ranks of a replica "
                    "have the same outputs: give them the same targets, or compute the loss on "
                    'the last stage only: Pipeline(..., outputs="last")'
                )


def num_samples(
    headers: Sequence[CallHeader], replicas: Sequence[Ranks], readers: Sequence[int]
) -> list[int]:
    """Return N of each replica, whose stages `readers` read inputs; BatchError if ranks differ."""
    counts = []
    for replica, stages in enumerate(replicas):
        of_replica = f" of replica {replica}" if len(replicas) > 1 else ""
        # Each reader of inputs has some.
        for reader, rank in ((r, rank) for r in readers for rank in stages[r]):
            if headers[rank].num_inputs is None:
                raise BatchError(
                    f"rank {rank} runs stage {reader}{of_replica} and was given no inputs; "
                    "give them on every rank, or at least where they are read"
                )
        # All numbers of samples are the first reader's.
        first, ranks = stages[readers[0]][0], sorted({*chain.from_iterable(stages)})
        count = headers[first].num_inputs
        assert count is not None
        for rank in ranks:
            _check_count(first, count, rank, headers[rank])
        # The last stage has targets, if there are any.
        missing = [rank for rank in stages[-1] if headers[rank].num_targets is None]
        if missing and any(headers[rank].num_targets is not None for rank in ranks):
            raise BatchError(
                f"rank {missing[0]} runs the last stage{of_replica} and was given no "
                "targets; give them on every rank, or at least there"
            )
        counts.append(count)
    return counts


def _check_count(first: int, count: int, rank: int, header: CallHeader) -> None:
    """Compare the samples of a rank with the `count` of the `first` one."""
    if rank == first and header.num_targets not in (None, count):
        raise BatchError(
            f"inputs hold {count} samples, targets {header.num_targets}; dimension 0 of "
            "tensors is the batch, and lists have one entry per sample"
        )
    for name, number in (("inputs", header.num_inputs), ("targets", header.num_targets)):
        if number not in (None, count):
            raise BatchError(
                f"rank {first} was given {count} inputs, rank {rank} {number} {name}; all "
                "ranks of a replica must be given the same mini-batch"
            )


def check_same(
    world: Control,
    replicas: Sequence[Sequence[int]],
    digests: Sequence[tuple[int | None, int | None]],
    mine: Texts,
) -> None:
    """Raise BatchError, on every process, if ranks of a replica were given different batches.

    `digests` are of all ranks, `mine` the texts of this one.
    """
    for ranks in replicas:
        for k in range(2):  # inputs, targets
            givers = [rank for rank in ranks if digests[rank][k] is not None]
            if len({digests[rank][k] for rank in givers}) > 1:
                _refuse(world.gather(mine[k], "for what the others were given"), givers, k)


def _refuse(texts: Sequence[Sequence[str]], ranks: Sequence[int], k: int) -> None:
    """Raise BatchError with the first tensor in which these ranks differ: an input if `k` is 0."""
    kind, first = ("inputs", "targets")[k], ranks[0]
    # The first place at which their lines differ, and the ranks with each line there.
    of_rank = {rank: dict(enumerate(texts[rank])) for rank in ranks}
    places = range(max(len(texts[rank]) for rank in ranks))
    place = next(n for n in places if len({of_rank[rank].get(n) for rank in ranks}) > 1)
    by_text: dict[str, list[str]] = {}
    for rank in ranks:
        by_text.setdefault(of_rank[rank].get(place, "nothing"), []).append(str(rank))
    num_tensors = len(texts[first])
    which = kind if num_tensors == 1 else f"{kind} (tensor {place} of {num_tensors})"
    values = "; ".join(
        f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}: {text}"
        for text, names in by_text.items()
    )
    raise BatchError(
        f"the ranks of a replica were given different {which}: {values}. They work on one "
        "mini-batch together: seed their loaders alike, and give a DistributedSampler the number "
        "of the replica (mesh.replica of mesh.num_replicas), not that of the rank"
    )


def _lines(batch: FlatBatch | None, *, with_values: bool) -> Iterator[str]:
    """Yield a line per tensor, and with values also one per plain value."""
    if batch is None:
        return
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
    """Return the CRC-32 of a tensor's bits: of all integers, or of floats at even distances."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if tensor.is_floating_point() or tensor.is_complex():
        flat = flat[:: flat.numel() // _MOST_ELEMENTS | 1]  # an odd distance: not one column only
    words = flat.contiguous().view(_WORDS[tensor.element_size()]).cpu()
    return crc32(words.numpy().tobytes())
