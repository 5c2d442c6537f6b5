"""Bytes of one micro-batch that a stage keeps, sends and receives, for any run of layers.

A value passes from its producer's stage through all stages that use it, in order; its gradient
passes back the same way:

    made on stage 0, used on 1 and 3:     0 ──► 1 ──► 3

So a stage receives each value at most once and sends it at most once.  Its bytes depend on its own
start and end only, not on the other cuts.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.costs.records import AtSize, Value
from penstock.schedules.memory import Kept
from penstock.schedules.transfers import Transfer
from penstock.types import Recompute, RecomputeLayers, RecomputePolicy


class Rectangle(NamedTuple):
    """An amount, and the runs that it counts for."""

    first_start: int
    last_start: int
    first_end: int
    last_end: int
    amount: int


class Rectangles:
    """Sums of amounts for each run [start, end) of `num_layers` layers.

    A rectangle counts for every run with a start from `first_start` to `last_start` and an end
    from `first_end` to `last_end`, all included.
    """

    def __init__(self, num_layers: int, rectangles: Iterable[Rectangle]) -> None:
        self._size = num_layers + 1
        self._rectangles = np.array([*rectangles], dtype=np.int64).reshape(-1, 5).T

    def __call__(self, start: int, end: int) -> int:
        from_start, to_start, from_end, to_end, amounts = self._rectangles
        has_start = (from_start <= start) & (start <= to_start)
        return int(amounts[has_start & (from_end <= end) & (end <= to_end)].sum())

    @cached_property
    def table(self) -> NDArray[np.int64]:
        """The sums of all runs, as [start, end]."""
        from_start, to_start, from_end, to_end, amounts = self._rectangles
        # A rectangle is four corners, whose signs cancel outside of it in a sum over both axes.
        corners = np.zeros((self._size + 1, self._size + 1), dtype=np.int64)
        np.add.at(corners, (from_start, from_end), amounts)
        np.add.at(corners, (to_start + 1, to_end + 1), amounts)
        np.add.at(corners, (from_start, to_end + 1), -amounts)
        np.add.at(corners, (to_start + 1, from_end), -amounts)
        return corners.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]


MODEL_INPUT = -1
"""The producer of the caller's batch."""


class Message(NamedTuple):
    """A message between two stages: its bytes, and those of its gradients back."""

    transfer: Transfer
    num_bytes: int
    gradient_bytes: int


class _Need(NamedTuple):
    """A layer for which its stage keeps a storage, if the stage starts after layer `after`."""

    layer: int
    after: int


class StageBytes:
    """Bytes of one micro-batch on a stage of layers [start, end), as `Rectangles`.

    `copies_weights`: as between processes, a weight of an earlier stage comes with each
    micro-batch and is kept like other values; else it takes no bytes here.

    graph       all that is kept for a backward, each storage once: tensors inside layers, saved
                and received values; with the last layer also those of the loss, and the targets
    incoming    the received values and the targets, which a stage that recomputes keeps
    left        the most that the input part of a divided backward leaves to the weight part
    given       the caller's batch, on its first stage, and the targets on the last

    received, sent                       activations from other stages, and to them
    received_gradient, sent_gradient     gradients of what was received, and of what was sent
    """

    def __init__(self, at: AtSize, *, copies_weights: bool = True) -> None:
        self._at = at
        self._num_layers = len(at.kind_of)
        self._travels = [v for v in at.values if v.consumers]
        self._arrives = [v for v in self._travels if copies_weights or not v.is_weight]
        self._bytes_of: dict[int, int] = defaultdict(int)
        for value in at.values:
            self._bytes_of[value.storage] = max(self._bytes_of[value.storage], value.num_bytes)

    @cached_property
    def graph(self) -> Rectangles:
        needs = self._needs_of_arrivals()
        for layer, saved in enumerate(self._saved_by):
            for value in saved:
                needs[value.storage].append(_Need(layer, MODEL_INPUT))
        for value in self._saved_by_loss:
            needs[value.storage].append(_Need(self._num_layers - 1, MODEL_INPUT))
        inside = self._each_layer(self.inner_bytes, self._of_loss)
        return self._made((*inside, *self._kept(needs), self._targets))

    @cached_property
    def incoming(self) -> Rectangles:
        return self._made((*self._kept(self._needs_of_arrivals()), self._targets))

    @cached_property
    def left(self) -> Rectangles:
        layers = [self._at.layer(n).left_bytes for n in range(self._num_layers)]
        of_loss = self._at.loss.left_bytes if self._at.loss else 0
        return self._made(self._each_layer(layers, of_loss))

    @cached_property
    def given(self) -> Rectangles:
        inputs = (v for v in self._travels if v.producer == MODEL_INPUT)
        last = self._num_layers
        kept_inputs = (
            Rectangle(0, v.consumers[0], v.consumers[0] + 1, last, v.num_bytes) for v in inputs
        )
        return self._made((*kept_inputs, self._targets))

    @cached_property
    def received(self) -> Rectangles:
        return self._made(r for v in self._travels for r in _received(v, self._num_layers))

    @cached_property
    def received_gradient(self) -> Rectangles:
        values = (v for v in self._travels if v.has_gradient)
        return self._made(r for v in values for r in _received(v, self._num_layers))

    @cached_property
    def sent(self) -> Rectangles:
        return self._made(r for v in self._travels for r in _sent(v))

    @cached_property
    def sent_gradient(self) -> Rectangles:
        return self._made(r for v in self._travels if v.has_gradient for r in _sent(v))

    @cached_property
    def inner_bytes(self) -> tuple[int, ...]:
        """Bytes of the tensors that each layer saves inside."""
        return tuple(self._at.layer(n).inner_bytes for n in range(self._num_layers))

    def freed_bytes(self, layer: int) -> int:
        """Return about how many bytes the recompute of a layer frees."""
        at = self._at
        storages = {v.storage for n in at.saved[layer] if (v := at.values[n]).producer == layer}
        return self.inner_bytes[layer] + sum(self._bytes_of[storage] for storage in storages)

    def kept(
        self, run: tuple[int, int], policy: RecomputePolicy, *, divides: bool = False
    ) -> Kept:
        """Return the bytes that a stage of a run of layers keeps under a recompute policy.

        With `divides` its backward may be in two parts, before which all layers are recomputed.
        """
        graph, dropped = self.graph(*run), self.incoming(*run)
        if policy is Recompute.LAYERS or isinstance(policy, RecomputeLayers):
            recomputed = policy.layers if isinstance(policy, RecomputeLayers) else range(*run)
            dropped, most = self._by_layers(run, recomputed)
            graph = graph if divides else most
        return Kept(graph, dropped, self.left(*run), self.given(*run))

    def _by_layers(self, run: tuple[int, int], again: Sequence[int | str]) -> tuple[int, int]:
        """Return the bytes after a forward if the layers `again` keep their inputs only, and the
        peak of the backward, which recomputes these one at a time, the last first.
        """
        storages, of_loss = set[int](), run[1] == self._num_layers

        def more(values: Iterable[Value]) -> dict[int, int]:
            new = {v.storage for v in values} - storages
            return {storage: self._bytes_of[storage] for storage in new}

        def add(values: Iterable[Value]) -> int:
            new = more(values)
            storages.update(new)
            return sum(new.values())

        # 1. The values from earlier stages, and the targets.
        came = (v for n in range(*run) for v in self._arrives_at[n] if v.producer < run[0])
        total = most = add(came) + of_loss * self._at.target_bytes
        # 2. Each layer: a recomputed one keeps its inputs, and its graph during its backward.
        for layer in range(*run):
            if layer in again:
                total += add(self._given_to[layer])
                inside = self.inner_bytes[layer] + sum(more(self._saved_by[layer]).values())
                most = max(most, total + inside)
            else:
                total += self.inner_bytes[layer] + add(self._saved_by[layer])
        # 3. The loss.
        if of_loss:
            total += self._of_loss + add(self._saved_by_loss)
        return total, max(most, total)

    def kept_by(
        self,
        partition: Sequence[int],
        recompute: Sequence[RecomputePolicy],
        divides: Collection[int] = (),
    ) -> tuple[Kept, ...]:
        """Return the bytes that each stage keeps; those of `divides` divide backwards."""
        runs = pairwise(accumulate(partition, initial=0))
        return tuple(
            self.kept(run, policy, divides=stage in divides)
            for stage, (run, policy) in enumerate(zip(runs, recompute, strict=True))
        )

    def messages(self, partition: Sequence[int]) -> tuple[Message, ...]:
        """Return the messages between the stages of a partition."""
        stage_of = [stage for stage, count in enumerate(partition) for _ in range(count)]
        crossing: dict[tuple[int, int], list[Value]] = defaultdict(list)
        for value in self._travels:
            for edge in pairwise(sorted({stage_of[layer] for layer in _holders(value)})):
                crossing[edge].append(value)
        return tuple(
            Message(
                Transfer(producer=edge[0], consumer=edge[1], values=tuple(map(_name_of, values))),
                sum(v.num_bytes for v in values),
                sum(v.num_bytes for v in values if v.has_gradient),
            )
            for edge, values in sorted(crossing.items())
        )

    @property
    def _targets(self) -> Rectangle:
        """The targets, which the stage of the last layer keeps."""
        last = self._num_layers
        return Rectangle(0, last - 1, last, last, self._at.target_bytes)

    @property
    def _of_loss(self) -> int:
        return self._at.loss.inner_bytes if self._at.loss else 0

    @cached_property
    def _saved_by(self) -> list[list[Value]]:
        values = self._at.values
        return [[values[n] for n in saved if not values[n].is_weight] for saved in self._at.saved]

    @cached_property
    def _saved_by_loss(self) -> list[Value]:
        values = (self._at.values[n] for n in self._at.loss_saved)
        return [value for value in values if not value.is_weight]

    @cached_property
    def _given_to(self) -> list[list[Value]]:
        """The values that each layer takes, without weights."""
        return self._by_consumer(v for v in self._travels if not v.is_weight)

    @cached_property
    def _arrives_at(self) -> list[list[Value]]:
        """The values that a stage may receive, by the layers that use them."""
        return self._by_consumer(self._arrives)

    def _by_consumer(self, values: Iterable[Value]) -> list[list[Value]]:
        values_of: list[list[Value]] = [[] for _ in range(self._num_layers)]
        for value in values:
            for layer in value.consumers:
                values_of[layer].append(value)
        return values_of

    def _made(self, rectangles: Iterable[Rectangle]) -> Rectangles:
        return Rectangles(self._num_layers, rectangles)

    def _each_layer(self, amounts: Sequence[int], of_loss: int) -> Iterator[Rectangle]:
        """Yield the amount of each layer, and that of the loss on the last layer's stage."""
        last = self._num_layers
        for layer, amount in enumerate(amounts):
            yield Rectangle(0, layer, layer + 1, last, amount)
        yield Rectangle(0, last - 1, last, last, of_loss)

    def _needs_of_arrivals(self) -> dict[int, list[_Need]]:
        """Return the layers that use values of earlier layers, by storage."""
        needs: dict[int, list[_Need]] = defaultdict(list)
        for value in self._arrives:
            needs[value.storage] += [_Need(layer, value.producer) for layer in value.consumers]
        return needs

    def _kept(self, needs: Mapping[int, Sequence[_Need]]) -> Iterator[Rectangle]:
        """Yield the runs that keep each storage: they have at least one layer that needs it."""
        for storage, of_storage in needs.items():
            layers_after: dict[int, list[int]] = defaultdict(list)
            for need in sorted(of_storage):
                layers_after[need.after].append(need.layer)
            marks = {need.after + 1 for need in of_storage} | {n.layer + 1 for n in of_storage}
            # Between two marks all starts have the same first layer that needs the storage; a run
            # that reaches this layer keeps the storage.
            for start, next_start in pairwise(sorted(marks)):
                after = [x for before, x in layers_after.items() if before < start]
                first = min((n for x in after for n in x[bisect_left(x, start) :][:1]), default=-1)
                if first >= 0:
                    size = self._bytes_of[storage]
                    yield Rectangle(start, next_start - 1, first + 1, self._num_layers, size)


def _holders(value: Value) -> list[int]:
    """Return the layers that hold a value, in order; the caller's batch has no producer."""
    return [*(() if value.producer == MODEL_INPUT else (value.producer,)), *value.consumers]


def _received(value: Value, num_layers: int) -> Iterator[Rectangle]:
    """Yield the runs that hold a value, and receive it from a holder before them."""
    for before, layer in pairwise(_holders(value)):
        yield Rectangle(before + 1, layer, layer + 1, num_layers, value.num_bytes)


def _sent(value: Value) -> Iterator[Rectangle]:
    """Yield the runs that hold a value, and send it to a holder after them."""
    for layer, behind in pairwise(_holders(value)):
        yield Rectangle(0, layer, layer + 1, behind, value.num_bytes)


def _name_of(value: Value) -> str:
    return "input" if value.producer == MODEL_INPUT else f"layer {value.producer}"
