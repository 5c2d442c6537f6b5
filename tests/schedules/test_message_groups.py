"""One queue of messages per rank: every schedule can be grouped, and the law knows what hangs."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedules import Backward, Family, Forward, Schedule, gpipe, one_f_one_b, parse
from penstock.schedules.ir import Communication, Instruction, Message, Receive, Send
from penstock.schedules.laws import Lanes, verify
from penstock.schedules.laws.one_queue import OneQueue
from penstock.schedules.lower import Lowering, Mode, lower
from penstock.schedules.message_groups import (
    Groups,
    communication,
    message_groups,
    message_positions,
)
from penstock.schedules.names import ASYNCHRONOUS_SCHEDULES
from penstock.schedules.passes import add_communication
from penstock.schedules.transfers import Transfer, Transfers, chain_transfers
from tests.every_schedule import EVERY_SCHEDULE, Dealt, families


def with_skips(num_stages: int) -> tuple[Transfer, ...]:
    """Give a chain, and a transfer between every two stages that are an even number apart."""
    skips = (
        Transfer(producer=first, consumer=last)
        for first in range(num_stages)
        for last in range(first + 2, num_stages, 2)
    )
    return (*chain_transfers(num_stages), *skips)


CASES = [
    *((chain_transfers(k), k, m) for k in (1, 2, 3, 4, 6) for m in {1, 3, k, 2 * min(k, 5)}),
    *((with_skips(k), k, k) for k in (3, 6)),
]
"""(transfers, stages, micro-batches): a few seconds for all schedules."""
MORE_CASES = [
    *((chain_transfers(k), k, m) for k in range(1, 9) for m in (2, 2 * k, 32)),
    *((with_skips(k), k, m) for k in range(3, 9) for m in (1, 2, 2 * k, 32)),
]


def alone(schedule: Schedule) -> Groups:
    """Give every message a group of its own, in program order."""
    return tuple(tuple((n,) for n in queue) for queue in message_positions(schedule))


def ends_with(schedule: Schedule, groups: Groups, transfers: Transfers = ()) -> bool:
    """Tell whether the law holds."""
    try:
        OneQueue(groups)(Lanes(schedule, transfers))
    except ScheduleError as error:
        assert "cannot run with one queue" in str(error) or "matched by their order" in str(error)
        return False
    return True


def prove(schedule: Schedule, transfers: Transfers) -> bool:
    """Prove the groups of a schedule; tell whether messages were joined, as they had to be."""
    groups = message_groups(schedule)
    verify(schedule, transfers, [OneQueue(groups)])
    is_joined = groups != alone(schedule)
    if is_joined:
        assert not ends_with(schedule, alone(schedule)), "joined without need"
    return is_joined


@pytest.mark.parametrize("family", EVERY_SCHEDULE, ids=lambda family: family.name)
def test_every_schedule_is_grouped_and_proved(family: Family) -> None:
    joined = [
        prove(add_communication(family(k, m), transfers), transfers) for transfers, k, m in CASES
    ]
    assert any(joined) and not all(joined)


@pytest.mark.slow
@pytest.mark.parametrize("family", EVERY_SCHEDULE, ids=lambda family: family.name)
def test_so_are_longer_ones_and_those_with_more_transfers(family: Family) -> None:
    for transfers, k, m in MORE_CASES:
        prove(add_communication(family(k, m), transfers), transfers)


@pytest.mark.parametrize("stages_per_rank", [2, 3, 4])
def test_so_are_several_stages_on_each_rank(stages_per_rank: int) -> None:
    for family in families(stages_per_rank):
        for num_ranks, m in ((2, 4), (2, 8), (3, 6), (4, 8)):
            k = num_ranks * stages_per_rank
            assert prove(add_communication(family(k, m), chain_transfers(k)), chain_transfers(k))


@pytest.mark.parametrize("family", ASYNCHRONOUS_SCHEDULES, ids=lambda family: family.name)
def test_so_are_schedules_in_which_weights_change(family: Family) -> None:
    how = Lowering(family=family, ranks=(0, 1, 2), transfers=chain_transfers(3))
    assert prove(lower(how, 4, num_minibatches=3), how.transfers)


@pytest.mark.parametrize("mode", Mode)
def test_so_is_whatever_passes_add(mode: Mode) -> None:
    how = Lowering(
        family=one_f_one_b,
        ranks=(0, 1, 2, 3),
        transfers=with_skips(4),
        recompute=(0, 2),
        offload=(1,),
        commits=(0, 1),
        posts=True,
        reduces=True,
    )
    assert prove(lower(how, 6, mode), how.transfers) == (mode in (Mode.TRAIN, Mode.BACKWARDS))


def test_gpipe_runs_message_by_message() -> None:
    schedule = add_communication(gpipe(4, 8), chain_transfers(4))
    assert message_groups(schedule) == alone(schedule)


BOTH_SEND_FIRST = parse(
    """rank 0 | 0F0 0F0>1 0F1 0F1>1 0B0<1 0B0 0B1<1 0B1
       rank 1 | 1F0<0 1F0 1B0 1B0>0 1F1<0 1F1 1B1 1B1>0""".replace("       ", "")
)


def test_a_receive_joins_the_send_before_it() -> None:
    ((_, joined, last), alone_) = message_groups(BOTH_SEND_FIRST)
    assert (joined, last, alone_) == ((3, 4), (6,), ((0,), (3,), (4,), (7,)))


def test_where_both_send_first_single_messages_hang() -> None:
    with pytest.raises(ScheduleError) as caught:
        verify(BOTH_SEND_FIRST, chain_transfers(2), [OneQueue(alone(BOTH_SEND_FIRST))])
    assert str(caught.value) == (
        "the schedule cannot run with one queue of messages per rank: rank 0 waits at 0F1>1 for "
        "rank 1, rank 1 waits at 1B0>0 for rank 0. In a CUDA graph a send ends only when its "
        "receive runs; take the groups that `message_groups` makes.\n"
        "rank 0 | 0F0 0F0>1 0F1 >>0F1>1<< 0B0<1 0B0 0B1<1 0B1   <-- here\n"
        "rank 1 | 1F0<0 1F0 1B0 >>1B0>0<< 1F1<0 1F1 1B1 1B1>0   <-- here"
    )


def test_a_receive_joins_from_behind_a_send_of_a_later_value() -> None:
    schedule = parse(
        "rank 0 | 0F0 0F0>1 0F1 0F1>1 2F0<1 2F0 2F0>3 2B0<3 2F1<1\n"
        "rank 1 | 1F0<0 1F0 1F0>2 3F0<2 3F0 3B0 3B0>2 1F1<0 1F1 1F1>2"
    )
    # 3F0<2 needs 2F0>3, which stands behind 0F1>1, and that needs 1F1<0, which stands behind 3B0>2
    assert message_groups(schedule) == (
        ((1,), (3, 4), (6,), (7,), (8,)),
        ((0,), (2,), (7, 3), (6,), (9,)),
    )


def test_programs_that_end_under_no_groups_are_refused() -> None:
    schedule = parse("rank 0 | 0B0<1 0F0 0F0>1\nrank 1 | 1F0<0 1F0 1B0 1B0>0")
    with pytest.raises(ScheduleError) as caught:
        message_groups(schedule)
    assert str(caught.value) == (
        "the schedule cannot run with one queue of messages per rank: rank 0 waits at 0B0<1 for "
        "rank 1, rank 1 waits at 1F0<0 for rank 0. In a CUDA graph a send ends only when its "
        "receive runs; here no send runs; let each stand before the receives that depend on it.\n"
        "rank 0 | >>0B0<1<< 0F0 0F0>1   <-- here\n"
        "rank 1 | >>1F0<0<< 1F0 1B0 1B0>0   <-- here"
    )


# -- the law against every order in which a run may go -----------------------------------------


@st.composite
def dealt(draw: st.DrawFn) -> Schedule:
    """Draw a small schedule that ends if sends do not wait, with its communication."""
    ranks = draw(st.sampled_from([(0, 1), (0, 1, 2), (0, 1, 0), (1, 0, 0), (0, 1, 0, 1)]))
    transfers = draw(st.sampled_from([chain_transfers, with_skips]))(len(ranks))
    num_microbatches = draw(st.integers(1, 3 if len(ranks) == 2 else 2))
    return add_communication(Dealt(ranks)(len(ranks), num_microbatches), transfers)


@st.composite
def grouped(draw: st.DrawFn) -> tuple[Schedule, Groups]:
    """Draw a schedule, and groups of its messages: neighbours, or in a slightly other order."""
    schedule = draw(dealt())
    if draw(st.booleans()):
        return schedule, message_groups(schedule)
    drawn = []
    for queue in message_positions(schedule):
        order = list(queue)
        for _ in range(draw(st.integers(0, 1))):
            n = draw(st.integers(0, len(order) - 2))
            order[n], order[n + 1] = order[n + 1], order[n]
        cuts = draw(st.lists(st.booleans(), min_size=len(order) - 1, max_size=len(order) - 1))
        groups: list[list[int]] = [[order[0]]]
        for position, is_cut in zip(order[1:], cuts, strict=True):
            groups.append([position]) if is_cut else groups[-1].append(position)
        drawn.append(tuple(map(tuple, groups)))
    return schedule, tuple(drawn)


State = tuple[tuple[int, int, bool], ...]
"""Of each rank: the number of computes that ended, of groups that ended, and if the next runs."""


@dataclass(frozen=True)
class Rendezvous:
    """A run in which every rank does one thing at a time, whichever rank goes first.

    A compute needs the messages of its own stage and micro-batch, a send the compute of its own.
    """

    schedule: Schedule
    groups: Groups

    def moves(self, state: State) -> Iterator[State]:
        """Give every state that may come next."""
        for rank, (num_computed, num_ended, runs) in enumerate(state):
            computes = self.computes(rank)
            if num_computed < len(computes):
                needed = self.needed(rank, computes[num_computed])
                if needed <= {m for group in self.messages(rank)[:num_ended] for m in group}:
                    yield self.changed(state, rank, (num_computed + 1, num_ended, runs))
            if runs and all(self.running(state)[m] == 2 for m in self.messages(rank)[num_ended]):
                yield self.changed(state, rank, (num_computed, num_ended + 1, False))
            elif not runs and num_ended < len(self.groups[rank]):
                made = {key(x) for x in computes[:num_computed]}
                if self.sent_values(rank, num_ended) <= made:
                    yield self.changed(state, rank, (num_computed, num_ended, True))

    def changed(self, state: State, rank: int, own: tuple[int, int, bool]) -> State:
        return (*state[:rank], own, *state[rank + 1 :])

    def computes(self, rank: int) -> list[Instruction]:
        return [x for x in self.schedule.programs[rank] if not isinstance(x, Communication)]

    def needed(self, rank: int, compute: Instruction) -> set[Message]:
        """Give the messages from other ranks that a compute uses."""
        receives = (
            self.schedule.programs[rank][n] for n in message_positions(self.schedule)[rank]
        )
        return {x.message for x in receives if isinstance(x, Receive) and key(x) == key(compute)}

    def messages(self, rank: int) -> list[list[Message]]:
        program = self.schedule.programs[rank]
        return [[communication(program, n).message for n in group] for group in self.groups[rank]]

    def sent_values(self, rank: int, number: int) -> set[tuple[bool, int, int]]:
        """Give the keys of the values that a group sends."""
        program = self.schedule.programs[rank]
        group = [program[n] for n in self.groups[rank][number]]
        return {key(x) for x in group if isinstance(x, Send)}

    def running(self, state: State) -> Counter[Message]:
        """Count the ranks on which each message runs or has run."""
        begun = (
            self.messages(rank)[: ended + runs] for rank, (_, ended, runs) in enumerate(state)
        )
        return Counter(chain.from_iterable(chain.from_iterable(begun)))

    def last_states(self) -> set[State]:
        """Give every state in which nothing more can happen, over all orders of events."""
        start: State = tuple((0, 0, False) for _ in self.groups)
        seen, to_do, last = {start}, [start], set()
        while to_do:
            state = to_do.pop()
            following = list(self.moves(state))
            if not following:
                last.add(state)
            to_do.extend(new for new in set(following) if new not in seen)
            seen.update(following)
        return last

    def end(self) -> State:
        """Give the state in which all has ended."""
        return tuple(
            (len(self.computes(rank)), len(own), False) for rank, own in enumerate(self.groups)
        )


def key(x: Instruction) -> tuple[bool, int, int]:
    """Give (is a backward, stage, micro-batch) of a compute, or of what is sent or received."""
    assert isinstance(x, Communication | Forward | Backward)  # drawn programs have no others
    gradient = x.gradient if isinstance(x, Communication) else isinstance(x, Backward)
    return gradient, x.stage, x.microbatch


def in_one_order(schedule: Schedule, groups: Groups) -> bool:
    """Tell whether each rank receives from each other in the order in which that sends."""
    orders: dict[type, dict[tuple[int, ...], list[Message]]] = {Send: {}, Receive: {}}
    for program, own in zip(schedule.programs, groups, strict=True):
        for n in chain.from_iterable(own):
            x = communication(program, n)
            kind = Send if isinstance(x, Send) else Receive
            ranks = tuple(schedule.ranks[stage] for stage in x.message[1:3])
            orders[kind].setdefault(ranks, []).append(x.message)
    return orders[Send] == orders[Receive]


@settings(max_examples=150, deadline=None)
@given(grouped())
def test_the_law_says_what_every_order_of_events_comes_to(drawn: tuple[Schedule, Groups]) -> None:
    run = Rendezvous(*drawn)
    last = run.last_states()
    assert len(last) == 1  # no order of events is luckier than another
    assert ends_with(*drawn) == (last == {run.end()} and in_one_order(*drawn))
