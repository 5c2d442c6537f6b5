"""A conversion keeps the value and its gradient, whatever the states before and after it."""

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock import Mesh
from penstock.mesh.collectives import Collectives
from penstock.planner.placement import Placement
from penstock.runtime.shards.convert import convert
from penstock.runtime.shards.sizes import Local, Sized
from penstock.sharding.layouts import (
    I,
    Move,
    P,
    R,
    S,
    State,
    even,
    moves,
    moves_between,
    moves_of,
    steps,
)
from tests.distributed.call import call

STATES: list[State] = [I, R, P, S(0), S(1)]
WHOLE = torch.arange(35.0).reshape(7, 5)


def with_sizes(state: State, count: int) -> State:
    return S(state.dim, even(WHOLE.shape[state.dim], count)) if isinstance(state, S) else state


def parts_of(whole: Tensor, count: int) -> list[Tensor]:
    """Return tensors whose sum is the whole."""
    shares = [whole * (n + 1) for n in range(count - 1)]
    return [*shares, whole - sum(shares)]


def held(whole: Tensor, state: State, rank: int, count: int, *, is_summed: State) -> Tensor:
    """Return what a device has of a whole; parts of a sum in the state that `is_summed`."""
    if isinstance(state, S):
        return whole.tensor_split(count, state.dim)[rank].clone()
    return parts_of(whole, count)[rank] if state is is_summed else whole.clone()


def all_conversions(mesh: Mesh) -> list[tuple[str, Tensor, Tensor]]:
    axis, found = mesh.shards.tensors, []
    for before, after in product(STATES, STATES):
        before, after = (with_sizes(state, axis.size) for state in (before, after))
        value = held(WHOLE, before, axis.rank, axis.size, is_summed=P).requires_grad_()
        converted = convert(value, (before,), (after,), [axis])
        gradient = held(-WHOLE, after, axis.rank, axis.size, is_summed=R)
        (back,) = torch.autograd.grad(converted, value, gradient)
        found.append((f"{before!r} to {after!r}", converted.detach(), back))
    return found


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_conversion_keeps_the_value_and_its_gradient(count: int, tmp_path: Path) -> None:
    ranks = call(all_conversions, Placement.of(range(1), num_shards=count), tmp_path)
    for number, (before, after) in enumerate(product(STATES, STATES)):
        name = ranks[0][number][0]
        for which, whole, state, summed in ((1, WHOLE, after, P), (2, -WHOLE, before, R)):
            got = [of_rank[number][which] for of_rank in ranks]
            if state is summed:
                assert torch.equal(sum(got[1:], got[0]), whole), name
                continue
            for rank, tensor in enumerate(got):
                wanted = held(whole, state, rank, count, is_summed=summed)
                assert torch.equal(tensor, wanted), name


def test_what_moves_forward_and_back_is_a_pair() -> None:
    assert moves(I, R) == (Move.NONE, Move.ALL_REDUCE)
    assert moves(S(0), R) == (Move.ALL_GATHER, Move.REDUCE_SCATTER)
    assert moves(P, S(1)) == (Move.REDUCE_SCATTER, Move.ALL_GATHER)
    assert moves(S(0), S(0)) == (Move.NONE, Move.NONE)


def test_a_later_axis_that_cuts_the_same_dimension_is_made_whole_first() -> None:
    assert list(steps((S(0), S(0)), (I, S(0)))) == [(1, S(0), I), (0, S(0), I), (1, I, S(0))]
    assert list(steps((I, S(0)), (S(0), I))) == [(1, S(0), I), (0, I, S(0))]
    assert list(steps((P, S(1)), (I, S(1)))) == [(0, P, I)]


def test_other_slices_of_the_same_dimension_come_from_the_whole() -> None:
    before, after = S(0, (3, 2)), S(0, (2, 3))
    assert list(steps((before,), (after,))) == [(0, before, I), (0, I, after)]


@pytest.mark.parametrize("num_axes", [1, 2, 3])
def test_tables_of_conversions_have_the_moves_of_each(num_axes: int) -> None:
    every = (*product((*STATES, S(2)), repeat=num_axes),)
    before, after = every[:: num_axes**2], every[num_axes - 1 :: num_axes**2]
    found, places, differs = moves_between(before, after)
    for (i, old), (j, new) in product(enumerate(before), enumerate(after)):
        assert differs[i, j] == (old != new)
        for way in (0, 1):
            own = [found[place[i, j, way]] for place in places]
            wanted = [(axis, cut, both[way]) for axis, cut, both in moves_of(old, new)]
            assert [x for x in own if x[2] is not Move.NONE] == [
                x for x in wanted if x[2] is not Move.NONE
            ]


def test_slices_differ_by_one_at_most() -> None:
    assert even(11, 3) == (4, 4, 3)


def test_a_slice_along_two_axes_begins_where_it_is_cut_from_the_whole() -> None:
    """By so much a kernel shifts the numbers of words and classes."""
    whole, found, outer = torch.arange(11), [], even(11, 2)
    for first, second in product(range(2), range(3)):
        axes = Collectives(rank=first, ranks=range(2)), Collectives(rank=second, ranks=range(3))
        local, layout = Local(Sized((), ()), axes), (S(0, outer), S(0, even(outer[first], 3)))
        part = local.part_of(whole, layout).tolist()
        assert part[0] == local.start(layout, 0)
        found += part
    assert found == whole.tolist()
