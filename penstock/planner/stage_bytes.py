"""What a stage keeps of a micro-batch and what crosses its ends, for any run of layers.

A value goes from the stage that gives it to the first later one that uses it, from there to the
next one that does, and so on, and its gradient the same way back:

    given on stage 0, used on 1 and 3:     0 ──► 1 ──► 3

So a stage gets each value at most once and sends it on at most once, wherever the others are cut;
and what it keeps and sends is known from its own start and end alone.
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
from penstock.schedules.memory import Kept, Sizes
from penstock.schedules.transfers import Transfer
from penstock.types import RecomputeLayers, RecomputePolicy


class Rectangle(NamedTuple):
    """An amount, and the runs that it counts for."""

    first_start: int
    last_start: int
    first_end: int
    last_end: int
    amount: int


class Rectangles:
    """Amounts for the runs of `num_layers` layers, added up for one of them, or for every one.

    A run is [start, end); a rectangle counts for every run whose start is from `first_start` to
    `last_start`, and whose end is from `first_end` to `last_end`, all included.
    """

    def __init__(self, num_layers: int, found: Iterable[Rectangle]) -> None:
        self._size = num_layers + 1
        self._found = np.array([*found], dtype=np.int64).reshape(-1, 5).T

    def __call__(self, start: int, end: int) -> int:
        """Return what counts for layers [start, end)."""
        from_start, to_start, from_end, to_end, amounts = self._found
        has_start = (from_start <= start) & (start <= to_start)
        return int(amounts[has_start & (from_end <= end) & (end <= to_end)].sum())

    @cached_property
    def table(self) -> NDArray[np.int64]:
        """All of it, [start, end]: made once, of corners that are summed up."""
        from_start, to_start, from_end, to_end, amounts = self._found
        corners = np.zeros((self._size + 1, self._size + 1), dtype=np.int64)
        np.add.at(corners, (from_start, from_end), amounts)
        np.add.at(corners, (to_start + 1, to_end + 1), amounts)
        np.add.at(corners, (from_start, to_end + 1), -amounts)
        np.add.at(corners, (to_start + 1, from_end), -amounts)
        return corners.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]


MODEL_INPUT = -1
"""The producer of what the caller gives."""


class Message(NamedTuple):
    """Bytes that a stage sends another one for each micro-batch, and of the gradients back."""

    transfer: Transfer
    num_bytes: int
    gradient_bytes: int


class _Need(NamedTuple):
    """A layer that makes a stage keep a storage, if the stage has it and starts after `after`."""

    layer: int
    after: int


class StageBytes:
    """Bytes of one micro-batch on a stage of layers [start, end), as `Rectangles`: call them with
    both, or take the `table` of all.

    `copies_weights`: a weight that has its home on an earlier stage comes with each micro-batch,
    and is kept as other values are, as between processes; else it is there anyway.

    `graph` is all that is kept for a backward: what layers save inside, what they save of values,
    and the values that came in, each storage once; with the last layer also what the loss saves,
    if that is known, and its targets.  `incoming` are the values that came in alone, and the
    targets: what is left of a graph that was dropped.  `left` is what the input part of a divided
    backward leaves to the weight part, at most.  `given` is the caller's batch, of the first stage
    that uses it, and of the one that computes the loss.

    `received` comes from other stages and `sent` goes to others, as activations;
    `received_gradient` is what goes back for the one, and `sent_gradient` what comes back for the
    other.
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
        every = self._each_layer(self.inner_bytes, self._of_loss)
        return self._made((*every, *self._kept(needs), self._targets))

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
        found = (
            Rectangle(0, v.consumers[0], v.consumers[0] + 1, last, v.num_bytes) for v in inputs
        )
        return self._made((*found, self._targets))

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
        """What each layer saves inside."""
        return tuple(self._at.layer(n).inner_bytes for n in range(self._num_layers))

    def freed_bytes(self, layer: int) -> int:
        """Return what is not kept, about, of a layer that is recomputed."""
        at = self._at
        own = {v.storage for n in at.saved[layer] if (v := at.values[n]).producer == layer}
        return self.inner_bytes[layer] + sum(self._bytes_of[storage] for storage in own)

    def kept(
        self, run: tuple[int, int], policy: RecomputePolicy, *, divides: bool = False
    ) -> Kept:
        """Return what a stage of a run of layers keeps that recomputes by a policy.

        With `divides`, all layers are recomputed before a backward: it is in two parts, or may be.
        """
        graph, dropped = self.graph(*run), self.incoming(*run)
        if isinstance(policy, RecomputeLayers):
            dropped, most = self._by_layers(run, policy.layers)
            graph = graph if divides else most
        return Kept(graph, dropped, self.left(*run), self.given(*run))

    def _by_layers(self, run: tuple[int, int], again: Sequence[int | str]) -> tuple[int, int]:
        """Return what is kept after a forward where some layers keep their inputs only, and the
        most until the end of the backward, which recomputes them one at a time, the last first.
        """
        storages, of_loss = set[int](), run[1] == self._num_layers

        def more(values: Iterable[Value]) -> dict[int, int]:
            found = {v.storage: self._bytes_of[v.storage] for v in values}
            return {storage: found[storage] for storage in found.keys() - storages}

        def add(values: Iterable[Value]) -> int:
            found = more(values)
            storages.update(found)
            return sum(found.values())

        came = (v for n in range(*run) for v in self._arrives_at[n] if v.producer < run[0])
        total = most = add(came) + of_loss * self._at.target_bytes
        for layer in range(*run):  # what it and the layers before it keep
            if layer in again:
                total += add(self._given_to[layer])
                inside = self.inner_bytes[layer] + sum(more(self._saved_by[layer]).values())
                most = max(most, total + inside)
            else:
                total += self.inner_bytes[layer] + add(self._saved_by[layer])
        if of_loss:
            total += self._of_loss + add(self._saved_by_loss)
        return total, max(most, total)

    def sizes(
        self,
        partition: Sequence[int],
        recompute: Sequence[RecomputePolicy],
        divides: Collection[int] = (),
    ) -> Sizes:
        """Return what the stages of a partition keep, for `schedules.memory`; some divide their
        backwards.
        """
        runs = pairwise(accumulate(partition, initial=0))
        each = [
            self.kept(run, policy, divides=stage in divides)
            for stage, (run, policy) in enumerate(zip(runs, recompute, strict=True))
        ]
        return Sizes(
            kept_bytes=tuple(kept.graph for kept in each),
            input_bytes=tuple(kept.inputs for kept in each),
            weight_bytes=tuple(kept.weights for kept in each),
            stay_bytes=tuple(kept.stays for kept in each),
        )

    def messages(self, partition: Sequence[int]) -> tuple[Message, ...]:
        """Return what the stages of a partition send each other, with its bytes."""
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
        """What counts where the last layer is."""
        last = self._num_layers
        return Rectangle(0, last - 1, last, last, self._at.target_bytes)

    @property
    def _of_loss(self) -> int:
        return self._at.loss.inner_bytes if self._at.loss else 0

    @cached_property
    def _saved_by(self) -> list[list[Value]]:
        """What each layer saves of values."""
        values = self._at.values
        return [[values[n] for n in saved if not values[n].is_weight] for saved in self._at.saved]

    @cached_property
    def _saved_by_loss(self) -> list[Value]:
        values = (self._at.values[n] for n in self._at.loss_saved)
        return [value for value in values if not value.is_weight]

    @cached_property
    def _given_to(self) -> list[list[Value]]:
        """The values that each layer is given, weights left out."""
        return self._by_consumer(v for v in self._travels if not v.is_weight)

    @cached_property
    def _arrives_at(self) -> list[list[Value]]:
        """The values that come to a stage, by the layers that use them."""
        return self._by_consumer(self._arrives)

    def _by_consumer(self, values: Iterable[Value]) -> list[list[Value]]:
        found: list[list[Value]] = [[] for _ in range(self._num_layers)]
        for value in values:
            for layer in value.consumers:
                found[layer].append(value)
        return found

    def _made(self, found: Iterable[Rectangle]) -> Rectangles:
        return Rectangles(self._num_layers, found)

    def _each_layer(self, amounts: Sequence[int], of_loss: int) -> Iterator[Rectangle]:
        """Yield what counts wherever a layer is, and what counts where the last one is."""
        last = self._num_layers
        for layer, amount in enumerate(amounts):
            yield Rectangle(0, layer, layer + 1, last, amount)
        yield Rectangle(0, last - 1, last, last, of_loss)

    def _needs_of_arrivals(self) -> dict[int, list[_Need]]:
        """Return by storage the layers that use what came from before their stage."""
        needs: dict[int, list[_Need]] = defaultdict(list)
        for value in self._arrives:
            needs[value.storage] += [_Need(layer, value.producer) for layer in value.consumers]
        return needs

    def _kept(self, needs: Mapping[int, Sequence[_Need]]) -> Iterator[Rectangle]:
        """Yield where each storage is kept, once: where a stage has a layer that needs it."""
        for storage, of_storage in needs.items():
            layers_after: dict[int, list[int]] = defaultdict(list)
            for need in sorted(of_storage):
                layers_after[need.after].append(need.layer)
            marks = {need.after + 1 for need in of_storage} | {n.layer + 1 for n in of_storage}
            for start, next_start in pairwise(sorted(marks)):
                # the first layer from a start on that needs it is the same up to the next mark
                after = [x for before, x in layers_after.items() if before < start]
                first = min((n for x in after for n in x[bisect_left(x, start) :][:1]), default=-1)
                if first >= 0:
                    size = self._bytes_of[storage]
                    yield Rectangle(start, next_start - 1, first + 1, self._num_layers, size)


def _holders(value: Value) -> list[int]:
    """Return the layers that have a value, in order; the caller's batch is on its users only."""
    return [*(() if value.producer == MODEL_INPUT else (value.producer,)), *value.consumers]


def _received(value: Value, num_layers: int) -> Iterator[Rectangle]:
    """Yield the runs that have a layer which holds a value, and another one before them."""
    for before, layer in pairwise(_holders(value)):
        yield Rectangle(before + 1, layer, layer + 1, num_layers, value.num_bytes)


def _sent(value: Value) -> Iterator[Rectangle]:
    """Yield the runs that have a layer which holds a value, and another one behind them."""
    for layer, behind in pairwise(_holders(value)):
        yield Rectangle(0, layer, layer + 1, behind, value.num_bytes)


def _name_of(value: Value) -> str:
    return "input" if value.producer == MODEL_INPUT else f"layer {value.producer}"
