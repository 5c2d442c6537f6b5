"""Segments: the base family's schedule, stage for stage, and one segment's graph at a time."""

from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.schedules import (
    AtMostBytes,
    Costs,
    Forward,
    Schedule,
    Sizes,
    critical_path,
    eager_1f1b,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    pipedream,
    segmented,
    zb_h1,
    zb_v,
)
from penstock.schedules.lower import Lowering, lower
from penstock.schedules.memory import peak_bytes
from penstock.schedules.passes import add_recompute
from penstock.schedules.transfers import chain_transfers
from penstock.simulator import simulate

BASES = (one_f_one_b, eager_1f1b, gpipe, zb_h1(), interleaved_1f1b(), zb_v())


def joined(schedule: Schedule, sizes: tuple[int, ...]) -> tuple[list[object], ...]:
    """Give what a schedule does with whole stages, of the first segment it runs for each."""
    stage_of = [stage for stage, size in enumerate(sizes) for _ in range(size)]

    def of_base(x: object) -> tuple[type, int, int]:
        return type(x), stage_of[x.stage], x.microbatch  # type: ignore[attr-defined]

    return tuple([key for key, _ in groupby(program, of_base)] for program in schedule.programs)


@given(
    st.sampled_from(BASES), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 6)
)
def test_segments_run_as_their_stages_do_in_the_base_family(base, drawn, m) -> None:
    sizes = tuple(drawn) * base.stages_per_rank
    family, count = segmented(sizes, base), sum(sizes)
    schedule, whole = family(count, m), base(len(sizes), m)
    ones = (1,) * len(sizes)
    assert joined(schedule, sizes) == joined(whole, ones)
    assert schedule.ranks == family.ranks(count)
    lower(Lowering(family=family, ranks=schedule.ranks, transfers=chain_transfers(count)), m)
    costs, shares = Costs(forward_s=6, backward_s=12), [n for n in sizes for _ in range(n)]
    own = Costs(forward_s=tuple(6 / n for n in shares), backward_s=tuple(12 / n for n in shares))
    if "I" not in str(whole):
        assert simulate(schedule, own).step_s == pytest.approx(simulate(whole, costs).step_s)


def test_a_recomputing_rank_holds_the_graph_of_one_segment() -> None:
    graphs, inputs = (5, 9, 4, 6, 3, 7), (2, 1, 3, 1, 2, 1)
    schedule = add_recompute(segmented((2, 3, 1))(6, 8))
    kept = Sizes(kept_bytes=graphs, input_bytes=inputs)
    # rank 0: inputs of 3 micro-batches, the second segment's graph in place of its input; rank 1:
    # inputs of 2, the third segment is done with one of them, the second has its graph
    assert peak_bytes(schedule, kept) == (3 * (2 + 1) - 1 + 9, 2 * (3 + 1 + 2) - 2 - 1 + 6, 7)
    assert [x.stage for x in schedule.programs[0] if isinstance(x, Forward)][:2] == [0, 1]


LIMITED = critical_path(memory=AtMostBytes(Sizes(kept_bytes=1), 4))


@pytest.mark.parametrize(
    ("sizes", "base", "words"),
    [
        ([2, 2], one_f_one_b, r"sizes=\[2, 2\]: give the number of segments"),
        ((), one_f_one_b, "give the number of segments"),
        ((2, 0), one_f_one_b, "whole numbers of at least 1"),
        ((2, 2), "gpipe", "base='gpipe': only stages of a synchronous family"),
        ((2, 2), pipedream(), "only stages of a synchronous family"),
        ((2, 2), LIMITED, "without a limit of memory"),
        ((2, 2, 2), interleaved_1f1b(), "not a multiple of stages_per_rank=2"),
        ((2, 2), one_f_one_b, "is for 4 stages, and there are 5: make one for"),
    ],
)
def test_what_cannot_be_cut_is_refused(sizes: Any, base: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        segmented(sizes, base).ranks(5)
