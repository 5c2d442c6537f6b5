"""What each stage will hold in memory: the sum of what its program makes it keep."""

import pytest

from penstock.schedules import gpipe, ir, one_f_one_b, pipedream_2bw, zb_h1
from penstock.schedules.memory import Sizes, peak_bytes
from penstock.schedules.passes import add_communication, add_offload, add_recompute
from penstock.schedules.transfers import chain_transfers
from penstock.simulator import Costs, simulate
from penstock.simulator.memory import StageWeights, memory_of
from penstock.trace import MemoryKind, Timeline

COSTS = Costs(forward_s=1, backward_s=2, recompute_s=1, transfer_s=3, update_s=1)


def held(timeline: Timeline, stage: int, kind: MemoryKind) -> list[tuple[float, int]]:
    return [
        (s.time_s, s.kept_bytes) for s in timeline.memory if (s.stage, s.kind) == (stage, kind)
    ]


def predicted(schedule: ir.Schedule, weights: StageWeights, sizes: Sizes) -> Timeline:
    timeline = simulate(schedule, COSTS)
    num_stages = schedule.num_stages
    edges = {(g, a, b): 10 for g in (False, True) for a in range(9) for b in range(9)}
    kept, own = sizes.of_stages(num_stages), (weights,) * num_stages
    return Timeline(timeline.spans, memory_of(timeline, kept, own, edges))


SIZES = Sizes(kept_bytes=100, input_bytes=7, weight_bytes=40)
WEIGHTS = StageWeights(
    weight_bytes=1000, gradient_bytes=900, optimizer_bytes=2000, version_bytes=1000
)


def test_activations_of_two_microbatches_come_and_go() -> None:
    found = predicted(gpipe(1, 2), WEIGHTS, SIZES)
    assert held(found, 0, MemoryKind.ACTIVATIONS) == [(1, 100), (2, 200), (4, 100), (6, 0)]
    assert held(found, 0, MemoryKind.WEIGHTS) == [(0, 1000)]
    assert held(found, 0, MemoryKind.OPTIMIZER) == [(0, 2000)]
    assert held(found, 0, MemoryKind.GRADIENTS) == [(2, 900)]
    assert found.peak_bytes_of_ranks() == (1000 + 2000 + 900 + 200,)


def test_a_message_counts_at_its_receiver_while_it_is_on_its_way() -> None:
    found = predicted(gpipe(2, 1), WEIGHTS, SIZES)
    assert held(found, 1, MemoryKind.BOUNDARIES) == [(1, 10), (4, 0)]
    assert held(found, 0, MemoryKind.BOUNDARIES) == [(7, 10), (10, 0)]


@pytest.mark.parametrize("family", (gpipe, one_f_one_b, zb_h1()))
@pytest.mark.parametrize("recompute", (False, True))
def test_the_peak_of_activations_is_the_one_the_program_says(family, recompute) -> None:
    schedule = family(4, 6)
    if recompute:
        schedule = add_offload(add_recompute(schedule, (0, 2)), (1,))
    schedule = add_communication(schedule, chain_transfers(4))
    found = predicted(schedule, WEIGHTS, SIZES)
    assert tuple(found.peak_bytes().values()) == peak_bytes(schedule, SIZES)


def test_an_older_version_stays_until_its_last_backward() -> None:
    found = predicted(pipedream_2bw(2, 2, 3), WEIGHTS, SIZES)
    of_first = held(found, 0, MemoryKind.VERSIONS)
    assert max(size for _, size in of_first) == 1000
    assert of_first[-1][1] == 0
    assert Timeline.from_json(found.to_json()).memory == found.memory
