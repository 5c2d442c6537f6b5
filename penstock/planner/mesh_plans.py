"""Plan stages on sub-meshes together with their sharding, as Alpa does (Zheng et al. 2022).

number of micro-batches
    search     stages, meshes and memory policies by the formula of a step    (submeshes.py)
    prices     integer programs for each kind of layer and shape              (mesh_costs.py)
the best few of each  x  schedules  ──►  the simulator says which is fastest

A given layout is priced and simulated in the same way (`on_layout`).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, product, repeat
from math import inf, prod
from operator import attrgetter, itemgetter

from penstock.costs.cluster import Cluster
from penstock.costs.counting.graph import Graph
from penstock.costs.profile import Profile
from penstock.errors import ConfigError, PlanError
from penstock.schedules import gpipe
from penstock.sharding.costs import Costs as LayoutCosts
from penstock.sharding.costs import weights_of
from penstock.sharding.letters import base_name
from penstock.sharding.program import layers_s
from penstock.sharding.routed import routed_calls
from penstock.trace.progress import say, saying
from penstock.trace.units import bytes_text, count_text

from .bounds import even_step_s
from .mesh_candidates import OnMeshes, sizes_of
from .mesh_task import MeshTask, Try
from .parallelism import Parallelism, near_divisors
from .solvers import Solvers
from .submeshes import (
    Answer,
    MemoryPolicy,
    Stage,
    Submesh,
    Task,
    find_stages,
    hosts_of,
    no_room,
    submeshes,
)

_MOST_ANSWERS = 8
"""Answers of one search that are compared."""
_SEARCH_GAP = 0.001
"""Relative optimality gap of a search."""
_NEAR = 1.05
"""Answers are looked at up to this multiple of the best step, by the search's formula."""
_MARGIN = 1.5
"""Candidates that are not simulated are listed up to this multiple of the best step."""
_ROUNDED = 1e-9
"""Share of a sum by which rounding may change it at most."""
_MOST_MISSES = 2
"""Numbers of micro-batches in a row without a candidate, because others are faster."""
CUT_SHORT = "the search was interrupted"
"""Beginning of the line of a plan that says so: it is the best of a part of all."""


def find_on_meshes(task: MeshTask) -> tuple[list[OnMeshes], str]:
    """Return the candidates on meshes, fastest first, and a line that says so if the search was
    interrupted (Ctrl-C) after it had some.  A PlanError says what is missing if nothing fits.
    """
    _check_state(task)
    with Solvers() as solvers:
        search = _Search(task, solvers)
        ended = search.run()
    if not search.candidates:
        raise PlanError(search.missing)
    return sorted(search.candidates, key=attrgetter("step_s", "is_bound")), ended


def _check_state(task: MeshTask) -> None:
    """Raise a PlanError if all devices together have no room for a model's state: nothing fits.

    That is a lower bound.  The devices of a stage have together each of its weights at least once,
    and as much of gradients and optimizer state, by any ready plan and memory policy; the average
    device lacks no more than the fullest one.
    """
    graph, hosts = task.graph_of(task.numbers[0]), hosts_of(task.cluster)
    calls = chain.from_iterable(routed_calls(graph, n) for n in range(len(task.names)))
    weight_bytes = sum(spec.num_bytes for spec in weights_of(graph, [*calls]))
    state_bytes = (1 + task.state.gradients + task.state.optimizer) * weight_bytes
    room = sum(own.num_hosts * own.num_devices * own.memory_bytes for own in hosts)
    lacks = (state_bytes - room) / len(task.cluster.places)
    if lacks > _ROUNDED * state_bytes:
        raise PlanError(no_room(f"at least {bytes_text(lacks)}"))


class _Search:
    """The candidates so far, and `missing`, which says why the last search found none."""

    def __init__(self, task: MeshTask, solvers: Solvers | None = None) -> None:
        self.task, self._solvers = task, solvers
        self.candidates: list[OnMeshes] = []
        self.missing = "the activation memory of the schedules does not fit"

    def run(self) -> str:
        """Try all; return a line that says so if that was interrupted after some candidates."""
        done, most = 0, len(self.task.tries)
        try:
            for done, own in enumerate(self.tries(), 1):
                words = f"{count_text(own[0], 'micro-batch')}, {own[1]}"
                with saying(f"searching for stages: {words} ({done} of {most})"):
                    self.look(*own)
        except KeyboardInterrupt:
            if not self.candidates:
                raise
            if self._solvers is not None:
                self._solvers.shutdown(cancel_futures=True)
            say(ended := f"{CUT_SHORT} in part {done} of {most}")
            return ended
        return ""

    @property
    def best_s(self) -> float:
        """Seconds that a step must be below."""
        return min((own.step_s for own in self.candidates), default=self.task.limit_s)

    def tries(self) -> Iterator[Try]:
        """Yield what to try next, which depends on the best step so far in a quick search: that
        climbs numbers of micro-batches, and tries the rest with the best number.
        """
        every, tried = self.task.tries, set[Try]()
        if self.task.first_number is None:
            yield from every
            return
        for own in self._climbing(self.task.first_number):
            tried.add(own)
            yield own
        best = min(self.candidates, key=attrgetter("step_s"), default=None)
        number = self.task.numbers[-1] if best is None else best.prices.num_microbatches
        if best is not None or self.best_s == inf:
            yield from (own for own in every if own[0] == number and own not in tried)

    def _climbing(self, first: int) -> Iterator[Try]:
        """Yield the first tries of numbers of micro-batches, up and then down from a first one.

        Where nothing fits with that, it begins with the smallest micro-batches.
        """
        numbers = self.task.numbers
        begin = min(first, numbers[-1])
        yield self._first_try(begin)
        if self.best_s == inf and begin < numbers[-1]:
            begin = numbers[-1]
            yield self._first_try(begin)
        yield from self._climbing_along([n for n in numbers if n > begin])
        yield from self._climbing_along([n for n in numbers[::-1] if n < begin])

    def _climbing_along(self, numbers: Sequence[int]) -> Iterator[Try]:
        """Yield the first tries of numbers while steps get faster; none where nothing fits."""
        misses = 0
        for number in numbers if self.best_s < inf else ():
            before_s = self.best_s
            yield self._first_try(number)
            misses += self.best_s >= before_s
            if misses and (self.candidates or misses == _MOST_MISSES):
                return

    def _first_try(self, number: int) -> Try:
        """Return the try of a number with the first ready plan, without a price of bytes."""
        return number, self.task.shardings[0], self.task.without_byte_prices

    def look(self, number: int, sharding: str, policies: Sequence[MemoryPolicy]) -> None:
        """Add the candidates of so many micro-batches, a ready plan and memory policies."""
        task = self.task
        if self._even_s(number) >= self.best_s:
            return
        is_first = (number, sharding, policies) == self._first_try(number)
        prices = task.prices_of(number, sharding, policies, self._sizes(near=is_first))
        of_stages = cache(partial(prices.of_stages, is_1f1b=tuple(task.families) != (gpipe,)))
        sized = Task(len(task.names), hosts_of(task.cluster), of_stages, number)
        try:
            if self._solvers is not None:
                prices.begin(submeshes(sized.hosts), self._solvers)
            answers = self._answers(sized)
        except PlanError as error:
            self.missing = str(error)
            return
        self._compare(answers, partial(OnMeshes, task, prices=prices))

    def _sizes(self, *, near: bool) -> tuple[int, int] | None:
        """Return the fewest and most devices of meshes that a quick search looks at: as the best
        candidates have to twice as many, which need less memory each; and half as many where all
        that are `near` may be best.
        """
        best = [own for own in self.candidates if own.step_s <= _NEAR * self.best_s]
        if self.task.first_number is None or not best:
            return self.task.first_sizes
        fewest, most = sizes_of(best)
        return fewest // 2 if near else fewest, 2 * most

    def _even_s(self, number: int) -> float:
        """Return a step's seconds that all devices share evenly, no messages; 0 if they differ."""
        places = self.task.cluster.places
        if len({place.kind for place in places}) > 1:
            return 0.0
        graph, count = self.task.graph_of(number), len(self.task.names)
        costs = LayoutCosts((1,), self.task.cluster, known=self.task.known)
        seconds, factors = layers_s(graph, count, costs), self.task.factors_of(number)
        total_s = sum(s * f for s, f in zip(seconds, factors or repeat(1.0), strict=False))
        return even_step_s(total_s, 0.0, len(places), number)

    def _answers(self, sized: Task) -> list[Answer]:
        """Return the best answers for 1F1B, and if they fit for eager 1F1B and GPipe.

        A quick search takes those for 1F1B alone: other schedules run these where they fit.
        """
        find = partial(find_stages, sized, most=_MOST_ANSWERS, eps=_SEARCH_GAP)
        answers = find(ahead=1, limit_s=_NEAR * self.best_s)
        if self.task.first_number is not None:
            return answers
        # with a limit it is no error that none keeps more micro-batches
        limit_s = min(_NEAR * self.best_s, sys.float_info.max)
        for ahead in {2, sized.num_microbatches} - {1}:
            answers += find(ahead=ahead, limit_s=limit_s)
        in_order = sorted(answers, key=attrgetter("seconds", "devices"))
        return [*{answer.stages: answer for answer in in_order}.values()]

    def _compare(self, answers: Sequence[Answer], make: Callable[..., OnMeshes]) -> None:
        """Simulate every answer with every schedule whose lower bound beats the best step; keep
        the others with the bound alone, where they are near.
        """
        pairs = product(answers, self.task.families)
        made = [make(answer=answer, family=family) for answer, family in pairs]
        bounds = sorted(((own.least_s(), own) for own in made), key=itemgetter(0))
        for least_s, own in bounds:  # the fastest shorten the rest
            if least_s >= self.best_s:
                if self.candidates and least_s <= _MARGIN * self.best_s:
                    self.candidates.append(replace(own, step_s=least_s))
            elif own.fits() and (simulated := own.simulated()).step_s < self.task.limit_s:
                self.candidates.append(simulated)


_ATTENTION = "scaled_dot_product_attention"


def on_layout(
    parallelism: Parallelism, profile: Profile, cluster: Cluster, batch_size: int | None = None
) -> OnMeshes:
    """Return a layout with its predicted step, memory and plan.

    Raises:
        ConfigError: the layout does not divide the heads, layers, batch or devices; the profile is
            from a file, which has no operators.
    """
    # 1. Divide the devices, the batch and the layers.
    if profile.operators is None:
        raise ConfigError(
            f"nobody knows the operators of {profile.name}, which a layout divides; give the "
            "model instead of a profile from a file"
        )
    rows = parallelism.rows(cluster)
    number = parallelism.microbatches(rows, batch_size)
    samples = parallelism.microbatch_size * rows * number
    task = MeshTask.of(profile, cluster, samples, number)
    _check_heads(parallelism, task.graph_of(number), task.names)
    meshes = meshes_of(parallelism, cluster, rows)
    places = [n % parallelism.pipeline for n in range(parallelism.num_stages)]
    ends = parallelism.stages(profile.layers)
    stages = tuple(Stage(*own, meshes[place]) for own, place in zip(ends, places, strict=True))
    # 2. Price each stage on its mesh, and simulate the schedule.
    policy = parallelism.policy(profile.layers)
    prices = task.prices_of(number, parallelism.sharding(rows), (policy,))
    answer = Answer(stages, 0.0, tuple(own.submesh.devices for own in stages))
    own = OnMeshes(task, answer, parallelism.family, prices, given=str(parallelism))
    return own.simulated()


def meshes_of(parallelism: Parallelism, cluster: Cluster, rows: int) -> list[Submesh]:
    """Return the mesh of each rank of the pipeline, in order of devices.

    Raises:
        ConfigError: one has devices of several kinds.
    """
    shape, meshes = parallelism.shape(rows), []
    size = prod(shape)
    kinds = [kind for kind, host in enumerate(cluster.hosts) for _ in range(host.count)]
    for first in range(0, parallelism.pipeline * size, size):
        devices = tuple(range(first, first + size))
        hosts = sorted({cluster.places[n].host for n in devices})
        of_mesh = sorted({cluster.places[n].kind for n in devices})
        if len(of_mesh) > 1:
            raise ConfigError(
                f"devices {first} to {first + size - 1} of {cluster.name} are of several kinds, "
                f"{' and '.join(of_mesh)}; give a layout whose meshes have one kind each"
            )
        meshes.append(Submesh(kinds[hosts[0]], len(hosts), size, devices, shape))
    return meshes


def _check_heads(parallelism: Parallelism, graph: Graph, names: Sequence[str]) -> None:
    """Raise a ConfigError if the heads of attention do not divide among the devices."""
    for call in graph.calls if parallelism.tensor > 1 else ():
        if base_name(call.function) != _ATTENTION:
            continue
        for tensor in call.takes[:2]:  # queries, and keys, of which there may be fewer
            heads = graph.tensors[tensor].shape[-3]
            if heads % parallelism.tensor:
                raise ConfigError(
                    f"tensor={parallelism.tensor} does not divide the {heads} heads of layer "
                    f"{names[call.layer]!r}; {near_divisors(parallelism.tensor, heads)}"
                )
