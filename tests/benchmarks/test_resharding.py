"""What the ranks of a mesh want is what they get, and each element crosses to them once."""

import random
from itertools import product
from math import lcm, prod

import pytest
import torch

from benchmarks.resharding.cases import N_TO_M, ONE_TO_M, Case, Held, carry_out, laid_out
from benchmarks.resharding.plan import Resharding, plan_resharding
from penstock.errors import PlanError
from penstock.sharding.layouts import I, S, Shape, Slice, State
from penstock.transport.crossing import shares


def whole_of(shape: Shape) -> torch.Tensor:
    return torch.arange(1, prod(shape) + 1).reshape(shape)


def check_contents(plan: Resharding, shape: Shape) -> None:
    whole = whole_of(shape)
    tensors = {rank: whole[own.indices].clone() for rank, own in plan.held.items()}
    tensors |= {
        rank: torch.zeros(own.lengths, dtype=torch.int64) for rank, own in plan.wanted.items()
    }
    carry_out(plan, tensors)
    for rank, own in plan.wanted.items():
        assert torch.equal(tensors[rank], whole[own.indices]), rank


def check_each_wanted_element_crosses_once(plan: Resharding, shape: Shape) -> None:
    crossed, wanted = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    for piece in plan.crossing:
        crossed[piece.part.indices].add_(1)
    for own in plan.wanted.values():
        wanted[own.indices].fill_(1)
    assert torch.equal(crossed, wanted)


def loads(plan: Resharding) -> dict[int, int]:
    """Return how many elements each rank sends to the other mesh, or is sent."""
    found = dict.fromkeys([*plan.held, *plan.wanted], 0)
    for piece in plan.crossing:
        found[piece.sender] += prod(piece.part.lengths)
        found[piece.receiver] += prod(piece.part.lengths)
    return found


def check_shares(plan: Resharding) -> None:
    """All of the tensor is wanted: who has the same as others sends, or is sent, an even share."""
    carried = loads(plan)
    for side in (plan.held, plan.wanted):
        for rank, own in side.items():
            share = prod(own.lengths) / list(side.values()).count(own)
            assert carried[rank] <= 1.1 * share + 1, (rank, carried[rank], share)


def check_messages(plan: Resharding) -> None:
    for sender, receiver in product(plan.held, plan.wanted):
        sent = plan.sends(sender).get(receiver)
        assert sent == plan.receives(receiver).get(sender)


def random_side(rng: random.Random, shape: Shape, first: int) -> Held:
    mesh = rng.randint(1, 4), rng.randint(1, 4)
    states: list[State] = [I, *map(S, range(len(shape)))]
    return laid_out(shape, mesh, tuple(rng.choice(states) for _ in mesh), first)


@pytest.mark.parametrize(
    "seeds",
    [range(300), pytest.param(range(300, 3300), marks=pytest.mark.slow)],
    ids=["short", "long"],
)
def test_any_layout_becomes_any_other(seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        shape = tuple(rng.choice([1, 2, 3, 5, 8, 13, 24]) for _ in range(rng.randint(1, 4)))
        held, wanted = random_side(rng, shape, 0), random_side(rng, shape, 16)
        plan = plan_resharding(held, wanted)
        check_contents(plan, shape)
        check_each_wanted_element_crosses_once(plan, shape)
        check_shares(plan)
        check_messages(plan)
        assert plan == plan_resharding(held[::-1], rng.sample(wanted, len(wanted))), seed


@pytest.mark.parametrize("case", N_TO_M.values(), ids=N_TO_M)
def test_alpas_cases_from_mesh_to_mesh(case: Case) -> None:
    shape, mesh, before, next_mesh, after, num_messages = case
    shape = tuple(length // 32 for length in shape)
    plan = plan_resharding(
        laid_out(shape, mesh, before), laid_out(shape, next_mesh, after, first=prod(mesh))
    )
    check_contents(plan, shape)
    check_each_wanted_element_crosses_once(plan, shape)
    carried = loads(plan)
    assert sum(carried[rank] for rank in plan.held) == prod(shape)
    assert {carried[rank] for rank in plan.held} == {prod(shape) // prod(mesh)}
    assert {carried[rank] for rank in plan.wanted} == {prod(shape) // prod(next_mesh)}
    assert sum(len(plan.sends(rank)) for rank in plan.held) == num_messages


@pytest.mark.parametrize("case", ONE_TO_M.values(), ids=ONE_TO_M)
def test_alpas_cases_from_one_device(case: Case) -> None:
    shape, mesh = (2**12,), case.next_mesh
    plan = plan_resharding(
        laid_out(shape, case.mesh, case.before), laid_out(shape, mesh, case.after, first=1)
    )
    check_contents(plan, shape)
    check_each_wanted_element_crosses_once(plan, shape)
    check_shares(plan)
    assert loads(plan)[0] == prod(shape)
    assert len(plan.crossing) == prod(mesh) == case.num_messages
    assert [set(group) for group in plan.spreading] == [set(plan.wanted)] * (prod(mesh) > 1)


def test_replicas_gather_what_each_of_them_got() -> None:
    plan = plan_resharding(
        laid_out((12, 4), (3,), (S(0),)), laid_out((12, 4), (2, 2), (S(0), I), first=3)
    )
    assert [set(group) for group in plan.spreading] == [{3, 4}, {5, 6}]
    for group in plan.spreading:
        for rank, parts in group.items():
            assert parts == [part for got in plan.receives(rank).values() for part in got]


def test_shares_are_whole_rows_along_the_longest_dimension_where_that_is_even_enough() -> None:
    shape = (2, 31, 3)
    plan = plan_resharding([(0, Slice.of_all(shape))], laid_out(shape, (3,), (I,), first=1))
    assert [piece.part.lengths for piece in plan.crossing] == [(2, n, 3) for n in (10, 11, 10)]


def test_a_number_crosses_once() -> None:
    plan = plan_resharding(laid_out((), (2,), (I,)), laid_out((), (3,), (I,), first=2))
    check_contents(plan, ())
    check_each_wanted_element_crosses_once(plan, ())
    assert len(plan.crossing) == 1


def test_an_empty_tensor_needs_no_message() -> None:
    plan = plan_resharding(laid_out((0, 3), (2,), (S(1),)), laid_out((0, 3), (2,), (I,), first=2))
    check_contents(plan, (0, 3))
    assert not plan.crossing


@pytest.mark.parametrize(
    ("lengths", "carried"),
    [((80, 50), (40, 40)), ((80, 10), (70, 10)), ((80, 20, 12), (60, 10, 10))],
)
def test_slices_that_overlap_share_as_far_as_they_can(lengths: Shape, carried: Shape) -> None:
    slices = [Slice((0,), (length,), (80,)) for length in lengths]
    plan = plan_resharding(list(enumerate(slices)), list(enumerate(slices, start=len(slices))))
    check_contents(plan, (80,))
    check_each_wanted_element_crosses_once(plan, (80,))
    assert tuple(loads(plan).values()) == carried * 2


def test_only_what_is_wanted_crosses() -> None:
    held = laid_out((8, 8), (2, 2), (S(0), I))
    plan = plan_resharding(held, [(4, Slice((3, 5), (2, 3), (8, 8)))])
    check_contents(plan, (8, 8))
    check_each_wanted_element_crosses_once(plan, (8, 8))


def test_what_nobody_holds_is_refused() -> None:
    held = laid_out((8, 8), (4,), (S(0),))[:3]
    with pytest.raises(PlanError, match=r"rank 9 wants \(2, 8\) elements at \(6, 0\) .* \(8, 8\)"):
        plan_resharding(held, [(9, Slice.of_all((8, 8)))])


@pytest.mark.parametrize("num_senders", range(1, 9))
@pytest.mark.parametrize("num_receivers", range(1, 9))
def test_a_pipeline_sends_a_row_by_this_plan(num_senders: int, num_receivers: int) -> None:
    """What the benchmark measures is how messages between stages of several shards cross."""
    sides = range(num_senders), range(num_senders, num_senders + num_receivers)
    shape = (lcm(num_senders, num_receivers),)
    plan = plan_resharding(*([(rank, Slice.of_all(shape)) for rank in side] for side in sides))
    links = [
        (*link, Slice((share.begin,), (share.end - share.begin,), (share.num_blocks,)))
        for link, share in shares(sides).items()
    ]
    assert links == plan.crossing
