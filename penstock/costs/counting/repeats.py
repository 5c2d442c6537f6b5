"""Layers that were left out of a count, put back as copies of one that was counted.

layer       a    b    last           calls, tensors and values of b are those of a, moved by
tensors     ┌──┐ ┌──┐ ┌──┐           one period; a layer left out has b's, moved by 1, 2, ...
               period                periods, and all that comes later moves by them all
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from penstock.costs.records import AtSize, Value

from .graph import Call, Graph, Ref, TensorSpec


class Repeat(NamedTuple):
    """Layers that are left out of a shortened chain."""

    layer: int
    """The layer of the shortened chain that they follow, and that stands for them."""
    paths: tuple[str, ...]
    """Prefixes of the names of their parameters, one for each layer."""


class _Segment(NamedTuple):
    """The calls and tensors of a layer, each from the first number on."""

    first_call: int
    calls: Sequence[Call]
    first_tensor: int
    tensors: Sequence[TensorSpec]

    def normal(self, path: str, before: "_Segment") -> Hashable:
        """Return what is equal for a layer with the same calls, one period later.

        Both have to take the same values from the layers before `before`.
        """
        moved = _Moved(-self.first_tensor, -self.first_call, before.first)
        calls = tuple(replace(moved.call(call), layer=0) for call in self.calls)
        return calls, tuple(moved.spec(spec, (path, "")) for spec in self.tensors)

    @property
    def first(self) -> tuple[int, int]:
        """The numbers of its first tensor and of its first call."""
        return self.first_tensor, self.first_call


class _Moved(NamedTuple):
    """Moves numbers of tensors and calls, from the numbers `since` on."""

    tensors: int
    calls: int
    since: tuple[float, float] = (float("-inf"), float("-inf"))

    def tensor(self, number: int) -> int:
        return number + self.tensors * (number >= self.since[0])

    def call(self, call: Call, layers: int = 0) -> Call:
        return replace(
            call,
            layer=call.layer + layers,
            arguments=self._argument(call.arguments),
            options=self._argument(call.options),
            gives=tuple(map(self.tensor, call.gives)),
            changes=tuple(map(self.tensor, call.changes)),
            saved=tuple(map(self.tensor, call.saved)),
        )

    def spec(self, spec: TensorSpec, paths: tuple[str, str] = ("", "")) -> TensorSpec:
        """Return a tensor, with the second path in the place of the first in its name."""
        maker, name, (old, new) = spec.maker, spec.name, paths
        if maker is not None:
            maker += self.calls * (maker >= self.since[1])
        if name.startswith(old):
            name = new + name.removeprefix(old)
        return replace(spec, maker=maker, name=name)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(self.tensor(value.tensor))
        return tuple(map(self._argument, value)) if isinstance(value, tuple) else value


def whole_graph(
    graph: Graph, starts: Mapping[int, int], repeats: Sequence[Repeat], names: Sequence[str]
) -> Graph | None:
    """Return the graph of all layers; None if layers that ought to be equal have other calls.

    Args:
        graph: that of the shortened layers.
        starts: by layer, the number of the first tensor that it met.
        repeats: what was left out.
        names: prefixes of the names of the shortened layers' parameters.
    """
    for repeat in reversed(repeats):
        numbers = [repeat.layer - n for n in range(3)]
        segments = [*filter(None, (_segment(graph, starts, n) for n in numbers))]
        if len(segments) < len(numbers):
            return None
        (own, before, first), (path, path_before, _) = segments, [f"{names[n]}." for n in numbers]
        if _is_taken_later(graph, own, repeat.layer):
            return None
        if own.normal(path, before) != before.normal(path_before, first):
            return None
        graph = _with_copies(graph, own, before, repeat, path)
    return graph


def _is_taken_later(graph: Graph, own: _Segment, layer: int) -> bool:
    """Tell whether others than the next layer itself take what a layer makes, or the caller."""
    made = range(own.first_tensor, own.first_tensor + len(own.tensors))
    others = (x for x in graph.calls if x.layer > layer + 1 or (x.layer > layer and x.is_between))
    users = chain(graph.outputs, *(call.takes for call in others))
    return any(number in made for number in users)


def _segment(graph: Graph, starts: Mapping[int, int], layer: int) -> _Segment | None:
    """Return a layer's part of a graph; None if other calls are between its own."""
    first, end = starts[layer], starts[layer + 1]
    numbers = [n for n, call in enumerate(graph.calls) if call.layer == layer]
    if not numbers or numbers[-1] - numbers[0] + 1 != len(numbers):
        return None
    return _Segment(numbers[0], graph.of_layer(layer), first, graph.tensors[first:end])


def _with_copies(
    graph: Graph, own: _Segment, before: _Segment, repeat: Repeat, path: str
) -> Graph:
    count, period = len(repeat.paths), (len(own.tensors), len(own.calls))
    end_tensor, end_call = own.first_tensor + period[0], own.first_call + period[1]
    tensors, calls = list(graph.tensors[:end_tensor]), list(graph.calls[:end_call])
    entering = {n: of for n, of in graph.entering.items() if n <= repeat.layer}
    # 1. The copies.  They take what the layer before gives, so these numbers move.
    for n, new in enumerate(repeat.paths, 1):
        moved = _Moved(n * period[0], n * period[1], before.first)
        tensors += [moved.spec(spec, (path, f"{new}.")) for spec in own.tensors]
        calls += [moved.call(call, n) for call in own.calls]
        if repeat.layer in graph.entering:
            numbers = graph.entering[repeat.layer]
            entering[repeat.layer + n] = frozenset(map(moved.tensor, numbers))
    # 2. What comes later takes the last copy's results, and what was before stays.
    since = own.first_tensor, own.first_call
    moved = _Moved(count * period[0], count * period[1], since)
    tensors += [moved.spec(spec) for spec in graph.tensors[end_tensor:]]
    calls += [moved.call(call, count) for call in graph.calls[end_call:]]
    later = {n: of for n, of in graph.entering.items() if n > repeat.layer}
    entering |= {n + count: frozenset(map(moved.tensor, of)) for n, of in later.items()}
    outputs = tuple(map(moved.tensor, graph.outputs))
    return Graph(tuple(tensors), tuple(calls), outputs, entering)


def whole_size(size: AtSize, repeats: Sequence[Repeat]) -> AtSize | None:
    """Return the costs of all layers; None if layers that ought to be equal have others."""
    for repeat in reversed(repeats):
        found = _size_with_copies(size, repeat.layer, len(repeat.paths))
        if found is None:
            return None
        size = found
    return size


def _size_with_copies(size: AtSize, layer: int, count: int) -> AtSize | None:
    # 1. The layer, those beside it and their values have to be alike.
    made = _Made.of(size, layer)
    before, last = _Made.of(size, layer - 1), _Made.of(size, layer + 1)
    if made is None or before is None or last is None:
        return None
    if made != before or made.storages != last.storages:
        return None
    # A value of earlier layers goes to each of these three, or to neither of the later two.
    run = {layer - 1, layer, layer + 1}
    earlier = (set(value.consumers) for value in size.values if value.producer < layer - 1)
    if any(users & {layer, layer + 1} and not run <= users for users in earlier):
        return None
    values, period = _with_made(size.values, layer, count, made), len(made.storages)

    def later(places: Sequence[int]) -> tuple[int, ...]:
        return tuple(place + count * period * (place >= made.first) for place in places)

    kept, since = size.saved[layer], made.first - period
    copies = (tuple(p + n * period * (p >= since) for p in kept) for n in range(1, count + 1))
    return replace(
        size,
        kind_of=(*size.kind_of[:layer], *[size.kind_of[layer]] * count, *size.kind_of[layer:]),
        values=values,
        saved=(*size.saved[: layer + 1], *copies, *map(later, size.saved[layer + 1 :])),
        loss_saved=later(size.loss_saved),
    )


def _with_made(
    values: Sequence[Value], layer: int, count: int, made: "_Made"
) -> tuple[Value, ...]:
    """Return all values, with those that so many copies of a layer make."""
    # 1. The values of copies: in memory of their own, or in that of what they take.
    end, newest = made.first + len(made.storages), made.num_storages
    first = [value.storage for value in values[made.first : end]]
    own, copies = first, list[Value]()
    for n in range(1, count + 1):
        own = [own[place] if is_taken else newest + place for is_taken, place in made.storages]
        newest += made.num_new
        for value, storage in zip(values[made.first : end], own, strict=True):
            users = (layer + n + 1,)
            copies.append(replace(value, producer=layer + n, consumers=users, storage=storage))

    # 2. What was there: users and makers move, and later values share memory with the last copy's.
    moved = dict(zip(first, own, strict=True))

    def later(value: Value) -> Value:
        is_new = value.storage >= made.num_storages
        storage = value.storage + count * made.num_new * is_new
        producer = value.producer + count
        return replace(value, producer=producer, storage=moved.get(value.storage, storage))

    def used(value: Value) -> Value:
        users = [n + count * (n > layer) for n in value.consumers]
        if value.producer < layer - 1 and layer in users:
            users += range(layer + 1, layer + count + 1)
        return replace(value, consumers=tuple(sorted(users)))

    before = (*map(used, values[: made.first]), *values[made.first : end])
    return (*before, *copies, *(later(used(value)) for value in values[end:]))


@dataclass(frozen=True)
class _Made:
    """The values that a layer makes and its costs, which equal those of a layer that is alike."""

    first: int = field(compare=False)
    """The place of the first of them."""
    num_storages: int = field(compare=False)
    """Storages of all values up to the last of them."""
    num_new: int
    """Storages that they are the first to use."""
    storages: tuple[tuple[bool, int], ...]
    """By value: True and its place among the values before, or False and a new storage's place."""
    facts: tuple[object, ...]

    @classmethod
    def of(cls, size: AtSize, layer: int) -> "_Made | None":
        """Return the values of a layer; None if they are not used by the next layer alone, or lie
        in memory that neither the layer nor the one before has made.
        """
        places = [n for n, value in enumerate(size.values) if value.producer in (layer - 1, layer)]
        values = [size.values[n] for n in places]
        taken = [value.storage for value in values if value.producer < layer]
        own = values[len(taken) :]
        if len(taken) != len(own) or places != [*range(places[0], places[0] + len(places))]:
            return None
        first = places[len(taken)]
        old = 1 + max(value.storage for value in size.values[:first])
        if any(value.storage < old and value.storage not in taken for value in own):
            return None
        storages = tuple(
            (True, taken.index(s)) if s in taken else (False, s - old)
            for s in (value.storage for value in own)
        )
        facts = tuple((v.num_bytes, v.has_gradient, v.consumers == (layer + 1,)) for v in own)
        saved = tuple(n - first if n >= places[0] else n for n in size.saved[layer])
        num_storages = 1 + max(value.storage for value in size.values[: first + len(own)])
        return cls(
            first, num_storages, num_storages - old, storages, (facts, saved, size.kind_of[layer])
        )
