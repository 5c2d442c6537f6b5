"""What stages keep and send: for every run of layers, what unions of sets come to."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest

from penstock.costs.records import AtSize, Value
from penstock.planner.stage_bytes import MODEL_INPUT, StageBytes
from penstock.schedules.memory import Kept
from penstock.types import Recompute
from tests.planner.at_sizes import chain, drawn

Crossed = tuple[int, int]
"""Bytes, and those of gradients."""


def bytes_of(at: AtSize, kept: set[int]) -> int:
    """Add up storages, each as large as the largest value in it."""
    return sum(max(v.num_bytes for v in at.values if v.storage == s) for s in kept)


def incoming(at: AtSize, start: int, end: int, copies_weights: bool) -> set[int]:
    return {
        v.storage
        for v in at.values
        if v.producer < start and any(start <= c < end for c in v.consumers)
        if copies_weights or not v.is_weight
    }


def kept(
    at: AtSize,
    start: int,
    end: int,
    dropped: tuple[int, ...],
    copies_weights: bool,
    again: int | None = None,
) -> int:
    """Add up what stays after a forward of layers [start, end), from its definition; or what is
    there in the backward, while layer `again` is recomputed and those behind it are done.
    """
    storages, inner = incoming(at, start, end, copies_weights), 0
    for n in range(start, end if again is None else again + 1):
        if n in dropped:
            storages |= {v.storage for v in at.values if n in v.consumers and not v.is_weight}
        if n not in dropped or n == again:
            storages |= {at.values[v].storage for v in at.saved[n] if not at.values[v].is_weight}
            inner += at.layer(n).inner_bytes
    is_over = again is None and end == len(at.kind_of)
    of_loss = at.loss.inner_bytes if at.loss and is_over else 0
    return bytes_of(at, storages) + inner + of_loss


def runs(num_layers: int) -> list[tuple[int, int]]:
    return list(combinations(range(num_layers + 1), 2))


@pytest.mark.parametrize("copies_weights", (True, False))
def test_each_storage_is_kept_once_on_every_run_of_layers(copies_weights: bool) -> None:
    for seed in range(400):
        at = drawn(seed)
        of_stages = StageBytes(at, copies_weights=copies_weights)
        num_layers = len(at.kind_of)
        dropped = tuple(n for n in range(num_layers) if (seed >> n) % 2)
        fewer = Recompute.layers(*dropped) if dropped else None
        for run in runs(num_layers):
            came = bytes_of(at, incoming(at, *run, copies_weights))
            assert of_stages.incoming(*run) == of_stages.incoming.table[run] == came
            whole = kept(at, *run, (), copies_weights)
            assert of_stages.graph(*run) == of_stages.graph.table[run] == whole
            if fewer is not None:
                less = kept(at, *run, dropped, copies_weights)
                assert of_stages.kept(run, fewer).inputs == less
                one_by_one = [
                    kept(at, *run, dropped, copies_weights, n) for n in dropped if n in range(*run)
                ]
                assert of_stages.kept(run, fewer).graph == max([less, *one_by_one])
                assert of_stages.kept(run, fewer, divides=True).graph == whole
            assert of_stages.kept(run, Recompute.STAGE).inputs == came


def crossings(at: AtSize, bounds: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Crossed]:
    """Walk each value's way by hand: the bytes on each edge, and those of gradients."""
    found: dict[tuple[int, int], Crossed] = {}
    for v in at.values:
        has = [n for n in (v.producer, *v.consumers) if n != MODEL_INPUT and v.consumers]
        on = [k for k, (a, b) in enumerate(bounds) if any(a <= n < b for n in has)]
        for edge in pairwise(on):
            there, back = found.get(edge, (0, 0))
            found[edge] = there + v.num_bytes, back + v.num_bytes * v.has_gradient
    return found


def every_cut(num_layers: int) -> Iterator[list[tuple[int, int]]]:
    for num_stages in range(1, num_layers + 1):
        for ends in combinations(range(1, num_layers), num_stages - 1):
            yield list(pairwise((0, *ends, num_layers)))


def test_a_value_crosses_each_edge_of_its_way_once_and_its_gradient_comes_back() -> None:
    drawn_ones = map(drawn, range(150))
    for at, bounds in ((x, cut) for x in drawn_ones for cut in every_cut(len(x.kind_of))):
        of_stages, by_hand = StageBytes(at), crossings(at, bounds)
        messages = of_stages.messages([b - a for a, b in bounds])
        assert by_hand == {
            (m.transfer.producer, m.transfer.consumer): (m.num_bytes, m.gradient_bytes)
            for m in messages
        }
        for k, bound in enumerate(bounds):
            came = [crossed for (_, target), crossed in by_hand.items() if target == k]
            left = [crossed for (source, _), crossed in by_hand.items() if source == k]
            assert of_stages.received(*bound) == sum(there for there, _ in came)
            assert of_stages.received_gradient(*bound) == sum(back for _, back in came)
            assert of_stages.sent(*bound) == sum(there for there, _ in left)
            assert of_stages.sent_gradient(*bound) == sum(back for _, back in left)


def test_the_stages_of_a_chain_keep_what_the_paper_says() -> None:
    kept = StageBytes(chain(4)).kept_by((1, 3), (Recompute.STAGE, Recompute.layers(2)))
    first = Kept(graph=110, inputs=10, weights=5, stays=10)
    assert kept == (first, Kept(graph=230, inputs=230, weights=15))


def test_a_skip_goes_from_producer_to_consumer_directly() -> None:
    messages = StageBytes(chain(3, (0, 2))).messages((1, 1, 1))
    assert [(str(m.transfer), m.num_bytes, m.gradient_bytes) for m in messages] == [
        ("0 -> 1: layer 0", 10, 10),
        ("0 -> 2: layer 0", 1, 1),
        ("1 -> 2: layer 1", 10, 10),
    ]


def test_a_thousand_layers_with_a_mask_for_all_are_one_table() -> None:
    """The mask is on each stage; the first one has it from the caller."""
    long = chain(1000)
    mask = Value(MODEL_INPUT, tuple(range(1000)), 4, 2000, has_gradient=False)
    at = AtSize(
        microbatch_size=1,
        kinds=long.kinds,
        kind_of=long.kind_of,
        values=(*long.values, mask),
        saved=long.saved,
    )
    of_stages = StageBytes(at)
    assert of_stages.graph.table[10, 20] == 10 * 110 + 4
    assert of_stages.incoming.table[10, 20] == of_stages.received.table[10, 20] == 14
    assert of_stages.received_gradient.table[10, 20] == of_stages.sent_gradient(10, 20) == 10
    assert (of_stages.received(0, 20), of_stages.given(0, 20)) == (0, 14)
    assert of_stages.given(10, 20) == 0
