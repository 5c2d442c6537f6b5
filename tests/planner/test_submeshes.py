"""Stages on sub-meshes: a search finds what trying everything finds, host by host."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations, product
from math import inf
from typing import NamedTuple

import numpy as np
import pytest

from penstock.errors import ConfigError, PlanError
from penstock.planner.stage_program import Matrix
from penstock.planner.submeshes import Hosts, Stage, Submesh, Task, find_stages, submeshes

MEMORY = 100.0


class Price(NamedTuple):
    """The prices of a stage, in the order of a task's."""

    seconds: float
    stay_bytes: float
    microbatch_bytes: float
    handover_s: float = 0.0
    once_s: float = 0.0


def drawn_task(seed: int, hosts: Sequence[Hosts], most_layers: int) -> Task:
    """Return a task with prices that follow no rule; some stages cannot be, some lack memory, and
    some have several options.
    """
    random = np.random.default_rng(seed)
    num_layers = int(random.integers(1, most_layers + 1))
    num_microbatches = int(random.choice((1, 2, 3, 8, 64)))
    share = random.choice((0.0, 1.0, 2.0, 8.0))  # of memory that a stage needs at most
    known = {}
    num_options = {mesh: int(random.integers(1, 4)) for mesh in submeshes(hosts)}
    for mesh, (start, end) in product(num_options, combinations(range(num_layers + 1), 2)):
        own = []
        for _ in range(num_options[mesh]):
            stay, each = random.integers(0, 1 + int(MEMORY * share), 2).tolist()
            seconds, once_s = map(float, random.integers((1, 0), (30, 40)))
            own.append(Price(seconds, stay, each // 2, 0.0, once_s))
        handover_s = float(random.integers(0, 9))
        found = [price._replace(handover_s=handover_s) for price in own]
        known[start, end, mesh] = [None if random.random() < 0.05 else price for price in found]
    return task_of(num_layers, hosts, lambda *at: known[at], num_microbatches)


def task_of(
    num_layers: int,
    hosts: Sequence[Hosts],
    price: Callable[[int, int, Submesh], Sequence[Price | None]],
    num_microbatches: int,
) -> Task:
    """Return a task with the prices by option that are given for layers [start, end) on a mesh."""

    def prices(submesh: Submesh) -> Matrix:
        num_options = len(price(0, 1, submesh))
        found = np.full((num_options, 5, num_layers, num_layers + 1), inf)
        for start, end in combinations(range(num_layers + 1), 2):
            for option, own in enumerate(price(start, end, submesh)):
                found[option, :, start, end] = inf if own is None else own
        return found

    return Task(num_layers, hosts, cache(prices), num_microbatches)


def price_of(task: Task, stage: Stage, option: int) -> Price:
    table = task.prices(stage.submesh)[option]
    return Price(*table[:, stage.start, stage.end].tolist())


def every_answer(task: Task, meshes: Sequence[Submesh]) -> Iterator[tuple[Stage, ...]]:
    """Yield all cuts on all meshes that there are enough devices for."""

    def continued(start: int, left: tuple[int, ...]) -> Iterator[tuple[Stage, ...]]:
        if start == task.num_layers:
            yield ()
            return
        for mesh, end in product(meshes, range(start + 1, task.num_layers + 1)):
            size = mesh.num_hosts * mesh.num_devices
            can_be = np.isfinite(task.prices(mesh)[:, 0, start, end]).any()
            if size <= left[mesh.kind] and can_be:
                then = tuple(n - size * (k == mesh.kind) for k, n in enumerate(left))
                for rest in continued(end, then):
                    yield (Stage(start, end, mesh), *rest)

    yield from continued(0, tuple(own.num_hosts * own.num_devices for own in task.hosts))


def prices_of(task: Task, stages: Sequence[Stage], ahead: int) -> list[Price]:
    """Return the prices of stages by their fastest options of those that fit, sums of gradients
    counted; nothing if none fits.
    """
    found = []
    for n, stage in enumerate(stages):
        in_flight = min((len(stages) - n - 1) * ahead + 1, task.num_microbatches)
        fitting = []
        for option in range(len(task.prices(stage.submesh))):
            price = price_of(task, stage, option)
            needs = price.stay_bytes + in_flight * price.microbatch_bytes
            if needs <= task.hosts[stage.submesh.kind].memory_bytes:
                fitting.append((price.seconds + price.once_s / task.num_microbatches, option))
        if not fitting:
            return []
        found.append(price_of(task, stage, min(fitting)[1]))
    return found


def step_s(task: Task, stages: Sequence[Stage], ahead: int) -> float:
    """Return the seconds of a step by the formula."""
    total = slowest = 0.0
    prices = prices_of(task, stages, ahead)
    for price in prices:
        over = price.handover_s if price is not prices[-1] else 0.0
        total += price.seconds + over + (price.once_s if price is prices[0] else 0.0)
        slowest = max(slowest, price.seconds, (price.seconds + over) / ahead)
    return total + (task.num_microbatches - 1) * slowest


def are_host_by_host(task: Task, stages: Sequence[Stage]) -> bool:
    """Tell whether stages can be placed so that each host is full before the next one."""
    used = [0] * len(task.hosts)
    for *_, (kind, num_hosts, count, *_) in stages:
        begun = [kind for kind, own in enumerate(task.hosts) if used[kind] % own.num_devices]
        room = task.hosts[kind].num_devices - used[kind] % task.hosts[kind].num_devices
        if begun not in ([], [kind]) or count > room:
            return False
        used[kind] += num_hosts * count
    return True


KINDS = (
    [Hosts(2, 3, MEMORY)],
    [Hosts(1, 4, MEMORY), Hosts(1, 2, MEMORY / 2)],
    [Hosts(2, 1, MEMORY), Hosts(2, 2, MEMORY)],
    [Hosts(3, 2, MEMORY)],
    [Hosts(1, 2, MEMORY), Hosts(2, 1, MEMORY), Hosts(1, 1)],
)


def check(seed: int, eps: float, most: int, ahead: int = 1) -> bool:
    """Compare the search with trying everything; return whether anything fits."""
    task = drawn_task(seed, KINDS[seed % len(KINDS)], 4)
    every = every_answer(task, submeshes(task.hosts))
    placed = (stages for stages in every if are_host_by_host(task, stages))
    fitting = (stages for stages in placed if prices_of(task, stages, ahead))
    best = sorted(step_s(task, stages, ahead) for stages in fitting)[:most]
    try:
        answers = find_stages(task, most=most, eps=eps, ahead=ahead)
    except PlanError:
        answers = []
    assert len(answers) == len(best)
    assert len({answer.stages for answer in answers}) == len(answers)
    for answer, seconds in zip(answers, best, strict=True):
        assert seconds <= answer.seconds <= seconds * (1 + eps)
        assert answer.seconds == step_s(task, answer.stages, ahead)
        check_placed(answer.stages, task.hosts, answer.devices)
    for limit_s in best[:1]:
        below = find_stages(task, eps=0, ahead=ahead, limit_s=limit_s * 0.999)
        within = find_stages(task, eps=0, ahead=ahead, limit_s=limit_s * 1.001)
        assert not below and within[0].seconds == limit_s
    return bool(best)


def check_placed(
    stages: Sequence[Stage], hosts: Sequence[Hosts], devices: Sequence[tuple[int, ...]]
) -> None:
    """Check that each device is one stage's, of the kind it was planned for, and on which host."""
    places = [
        (kind, (kind, host))
        for kind, own in enumerate(hosts)
        for host in range(own.num_hosts)
        for _ in range(own.num_devices)
    ]
    every = [device for of_stage in devices for device in of_stage]
    assert len(set(every)) == len(every)
    for stage, of_stage in zip(stages, devices, strict=True):
        kind, num_hosts, number, *_ = stage.submesh
        assert {places[device][0] for device in of_stage} == {kind}
        on = Counter(places[device][1] for device in of_stage)
        assert sorted(on.values()) == [number] * num_hosts


SLOW = [
    pytest.param(*own, 250, marks=pytest.mark.slow) for own in ((1, 1), (2, 64), (4, 1), (4, 2))
]


@pytest.mark.parametrize(("most", "ahead", "count"), [(4, 1, 100), (4, 2, 100), *SLOW])
def test_the_search_finds_what_trying_everything_finds(most: int, ahead: int, count: int) -> None:
    fits = Counter(check(seed, 0.0, most, ahead) for seed in range(count))
    assert fits[True] > 0.4 * count and fits[False] > 0.02 * count


def test_close_bounds_lose_no_more_than_they_may() -> None:
    for seed in range(400, 550):
        check(seed, 0.2, 2)


def test_a_stage_has_a_part_of_a_host_or_whole_hosts() -> None:
    assert [mesh[1:3] for mesh in submeshes([Hosts(2, 3)])] == [(1, 1), (1, 2), (1, 3), (2, 3)]


def gpus(num_layers: int, hosts: Hosts, num_microbatches: int) -> Task:
    """Return a task like training a Transformer: more devices are faster, but not by as much."""

    def price(start: int, end: int, submesh: Submesh) -> list[Price]:
        size, length = submesh.num_hosts * submesh.num_devices, end - start
        across = 0.002 if submesh.num_hosts > 1 else 0.0005 * (size > 1)
        seconds = length * (4 / size * (1 + 0.02 * size.bit_length()) + across)
        return [Price(seconds, length * 48e9 / size, length * 6e9 / size, 0.01)]

    return task_of(num_layers, [hosts], price, num_microbatches)


@pytest.mark.slow
def test_of_a_thousand_devices_more_are_faster() -> None:
    best = find_stages(gpus(100, Hosts(125, 8, 80e9), 256))
    fewer = find_stages(gpus(100, Hosts(60, 8, 80e9), 256), most=1)
    assert len(best) == 8 and best[-1].seconds < fewer[0].seconds


def test_an_error_says_how_much_memory_is_missing() -> None:
    task = gpus(4, Hosts(1, 2, 80e9), 8)  # on both devices 96 GB each stay, and 12 GB are kept
    with pytest.raises(PlanError, match=r"need least lack 26.1 GiB on their fullest device"):
        find_stages(task)


def test_an_error_says_what_cannot_be_searched() -> None:
    task = gpus(4, Hosts(1, 6), 8)
    with pytest.raises(ConfigError, match="give at least 1 of each"):
        find_stages(task._replace(num_microbatches=0))
    with pytest.raises(PlanError, match="no price was given"):
        find_stages(task_of(4, task.hosts, lambda *at: [None], 8))
