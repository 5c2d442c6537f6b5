"""Cuts under a limit of memory: one is found wherever there is one."""

from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

import pytest

from penstock.costs.layer_facts import LayerBytes
from penstock.errors import ConfigError
from penstock.planner.balance import LayerMemory, balanced, predicted_s, tables_of
from penstock.planner.memory_limit import fitted, sizes_of
from penstock.planner.partition import each_layer
from penstock.planner.plan import Plan
from penstock.schedules import gpipe, one_f_one_b, pipedream, zb_h1
from penstock.schedules.family import Family
from penstock.types import Recompute
from tests.planner.plans import plan


def drawn_layers(random: Random, count: int) -> list[LayerBytes]:
    """Return layers of a chain: one's results are the next one's inputs."""
    crossing = [random.randint(1, 50) for _ in range(count + 1)]
    return [
        LayerBytes(
            inner=random.choice((0, random.randint(1, 100))),
            inputs=a,
            saved_inputs=random.choice((0, a)),
            results=b,
            saved_results=random.choice((0, b)),
            left=random.randint(0, 30),
        )
        for a, b in pairwise(crossing)
    ]


def test_tables_hold_what_each_run_of_layers_keeps() -> None:
    random = Random(1)
    for _ in range(100):
        layers = drawn_layers(random, random.randint(1, 7))
        tables = tables_of(layers)
        for ends in combinations(range(len(layers) + 1), 2):
            parts = [part for part in (ends[0], ends[1] - ends[0], len(layers) - ends[1]) if part]
            stage = 1 if ends[0] else 0
            sizes = sizes_of(parts, (Recompute.STAGE,) * len(parts), layers)
            kept = sizes.of_stages(len(parts))[stage]
            assert tuple(int(table[ends]) for table in tables) == (
                *(kept.graph, kept.inputs, kept.weights),
                kept.stays,
            )


def limited(family: Family, partition: tuple[int, ...], limits: tuple[int, ...]) -> Plan:
    return replace(
        plan(*partition, schedule=family, num_microbatches=4),
        recompute=(Recompute.NEVER,) * len(partition),
        memory_limit_bytes=limits,
    )


def fits(asked: Plan, memory: LayerMemory, seconds: list[float]) -> bool:
    try:
        fitted(asked, memory.kept, seconds, memory.trainable_bytes)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("family", (gpipe, one_f_one_b, zb_h1(), pipedream()), ids=repr)
@pytest.mark.parametrize("may_offload", (False, True))
def test_a_cut_that_fits_is_found_wherever_there_is_one(family: Family, may_offload: bool) -> None:
    random, found = Random(2), []
    for _ in range(40):
        num_layers = random.randint(2, 5)
        num_stages = random.randint(2, num_layers)
        limits = tuple(random.randint(50, 900) for _ in range(num_stages))
        seconds = [random.uniform(0.1, 1.0) for _ in range(num_layers)]
        trainable = [random.randint(0, 100) for _ in range(num_layers)]
        memory = LayerMemory(drawn_layers(random, num_layers), trainable)
        times_s = [(s, 2 * s) for s in seconds]
        cuts = [
            tuple(b - a for a, b in pairwise((0, *ends, num_layers)))
            for ends in combinations(range(1, num_layers), num_stages - 1)
        ]
        asked = [limited(family, each, limits) for each in cuts]
        asked = [replace(each, offload=(may_offload,) * num_stages) for each in asked]
        can_fit = any(fits(each, memory, seconds) for each in asked)
        cut = balanced(asked[0], times_s, each_layer(num_layers), memory)
        assert fits(cut, memory, seconds) == can_fit
        found.append(can_fit)
    assert {*found} == {False, True}


def test_layers_go_where_there_is_room_for_them_without_recompute() -> None:
    """Eight alike in two stages of GPipe; the first has room for two with all that they save:
    3 (1 + 1 + 2) against 5 (1 + 2) is even enough, 2 (1 + 2) against 6 (1 + 2) is slower.
    """
    layer = LayerBytes(inner=90, inputs=10, saved_inputs=10, results=10, saved_results=0)
    memory, times_s = LayerMemory([layer] * 8, [0] * 8), [(1.0, 2.0)] * 8
    slow = balanced(limited(gpipe, (4, 4), (800, 9000)), times_s, each_layer(8), memory)
    assert slow.partition == (3, 5)
    after = fitted(slow, memory.kept, [1.0] * 8, memory.trainable_bytes)
    assert after.recompute[0] is not Recompute.NEVER and after.recompute[1] is Recompute.NEVER
    assert predicted_s(after, times_s)[1] == 15.0


def test_where_nothing_fits_the_limit_is_left_to_who_says_by_how_much() -> None:
    layer = LayerBytes(inner=90, inputs=10, saved_inputs=10, results=10, saved_results=0)
    memory = LayerMemory([layer] * 8, [0] * 8)
    found = balanced(limited(gpipe, (1, 7), (5, 5)), [(1.0, 2.0)] * 8, each_layer(8), memory)
    assert found.partition == (4, 4)
