"""Baselines by name: the same planner, restricted to what other systems can plan.

intra           one stage on all devices
inter           each stage on one device
gpipe           the same, all forwards first, and stages recompute (Huang et al. 2019)
pp-dp           operators divided along samples only
equal-layers    as many of the layers that repeat in each stage, on any meshes
equal-operators stages as equal as possible in numbers of calls, on any meshes
megatron        as equal-layers on meshes of one shape, data x tensor (Narayanan et al. 2021)
deepspeed       one stage, by samples, with ZeRO-1 to 3 (Rajbhandari et al. 2020), or also experts
one-host        stages no larger than a host: nothing is divided across hosts

A baseline gives restricted copies of a task, and the fastest of their plans is its plan.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import numpy as np

from penstock.costs.layer_facts import LayerFacts
from penstock.errors import ConfigError, PlanError
from penstock.planner.make_plan import choose_on_meshes
from penstock.planner.mesh_costs import MeshPrices
from penstock.planner.mesh_task import MeshTask
from penstock.planner.plan import Plan
from penstock.planner.stage_program import Matrix
from penstock.planner.submeshes import MEMORY_POLICIES, Hosts, MemoryPolicy, Submesh
from penstock.schedules import gpipe
from penstock.types import Recompute

Allow = Callable[[int, int, Submesh], bool]
"""Tells whether layers [start, end) may be a stage on a mesh."""


@dataclass(frozen=True)
class RestrictedPrices(MeshPrices):
    """Prices of the stages that are allowed."""

    allow: Allow = lambda start, end, submesh: True

    def _may_be(self, submesh: Submesh) -> Matrix:
        found = super()._may_be(submesh)
        for start, end in np.argwhere(found).tolist():
            found[start, end] = self.allow(start, end, submesh)
        return found


def _intra(task: MeshTask) -> Iterator[MeshTask]:
    every = len(task.cluster.places)
    yield _allowing(task, lambda start, end, submesh: submesh.size == every)


def _inter(task: MeshTask) -> Iterator[MeshTask]:
    yield _allowing(task, lambda start, end, submesh: submesh.size == 1)


def _gpipe(task: MeshTask) -> Iterator[MeshTask]:
    for each in _inter(task):
        yield replace(each, families=(gpipe,), policies=[MemoryPolicy(Recompute.STAGE)])


def _pp_dp(task: MeshTask) -> Iterator[MeshTask]:
    yield replace(task, shardings=("data",), policies=_WITHOUT_BYTES)


def _equal_layers(task: MeshTask) -> Iterator[MeshTask]:
    for stages in equal_stages(task.model.layers, len(task.cluster.places)):
        yield _allowing(task, partial(_is_one_of, stages))


def _equal_operators(task: MeshTask) -> Iterator[MeshTask]:
    calls = Counter(call.layer for call in task.graph_of(task.numbers[0]).calls)
    counts = [calls[n] for n in range(len(task.names))]
    cuts = sorted({end for _, end in task.model.spans})
    for stages in even_stages(counts, cuts, len(task.cluster.places)):
        yield _allowing(task, partial(_is_one_of, stages))


def _deepspeed(task: MeshTask) -> Iterator[MeshTask]:
    plans = ("data", "zero1", "zero2", "zero3", "expert")
    for alone in _intra(task):
        yield replace(alone, shardings=plans, policies=_WITHOUT_BYTES)


def _one_host(task: MeshTask) -> Iterator[MeshTask]:
    yield _allowing(task, lambda start, end, submesh: submesh.num_hosts == 1)


def _megatron(task: MeshTask) -> Iterator[MeshTask]:
    num_devices = len(task.cluster.places)
    most = min(len(host.devices) for host in task.cluster.hosts)
    for stages in equal_stages(task.model.layers, num_devices):
        size, rest = divmod(num_devices, len(stages))
        for tensor in range(1, min(size, most) + 1):
            if rest or size % tensor or most % tensor:
                continue
            data = size // tensor
            plan = "data" if tensor == 1 else "megatron" if data == 1 else "grid"
            allow = partial(_is_one_of, stages, size=size)
            shape = (size,) if 1 in (tensor, data) else (data, tensor)
            prices = partial(RestrictedPrices, allow=allow, shapes=partial(_only, shape))
            yield replace(task, shardings=(plan,), prices=prices, policies=_WITHOUT_BYTES)


_WITHOUT_BYTES = [policy for policy in MEMORY_POLICIES if not policy.byte_s]
BASELINES: dict[str, Callable[[MeshTask], Iterator[MeshTask]]] = {
    "intra": _intra,
    "inter": _inter,
    "gpipe": _gpipe,
    "pp-dp": _pp_dp,
    "equal-layers": _equal_layers,
    "equal-operators": _equal_operators,
    "megatron": _megatron,
    "deepspeed": _deepspeed,
    "one-host": _one_host,
}


def plan_baseline(name: str, task: MeshTask) -> Plan:
    """Return the fastest plan of a baseline, by the simulator.

    Raises:
        ConfigError: there is no baseline of this name.
        PlanError: nothing fits; says what is missing.
    """
    if name not in BASELINES:
        raise ConfigError(f"there is no baseline {name!r}; there are {', '.join(BASELINES)}")
    plans, lacks = [], "no stages have as many layers each"
    for restricted in BASELINES[name](task):
        try:
            plans.append(choose_on_meshes(restricted).plan)
        except PlanError as error:
            lacks = str(error)
    if not plans:
        raise PlanError(f"{name}: {lacks}")
    return min(plans, key=step_s)


def step_s(plan: Plan) -> float:
    """Return the seconds of a step."""
    assert plan.predicted_step_s is not None, "it was simulated"
    return plan.predicted_step_s


def _allowing(task: MeshTask, allow: Allow) -> MeshTask:
    return replace(task, prices=partial(RestrictedPrices, allow=allow))


def _only(shape: tuple[int, ...], submesh: Submesh, hosts: Hosts) -> list[tuple[int, ...]]:
    return [shape]


def _is_one_of(
    stages: set[tuple[int, int]], start: int, end: int, submesh: Submesh, size: int | None = None
) -> bool:
    return (start, end) in stages and size in (None, submesh.size)


def equal_stages(layers: Sequence[LayerFacts], most: int) -> Iterator[set[tuple[int, int]]]:
    """Yield the (start, end) of 1, 2 ... stages, at most so many, that have as many each of the
    layers whose kind occurs more than once; others are beside them.
    """
    kinds = Counter(layer.kind for layer in layers)
    repeated = [n for n, layer in enumerate(layers) if kinds[layer.kind] > 1]
    repeated = repeated or [*range(len(layers))]
    for count in range(1, min(most, len(repeated)) + 1):
        each, rest = divmod(len(repeated), count)
        if not rest:
            starts = [0, *repeated[each::each]]
            yield {*zip(starts, [*starts[1:], len(layers)], strict=True)}


def even_stages(
    weights: Sequence[int], cuts: Sequence[int], most: int
) -> Iterator[set[tuple[int, int]]]:
    """Yield the (start, end) of 1, 2 ... stages, at most so many: each ends at the cut nearest to
    its even share of the weights of layers.
    """
    sums = list(accumulate(weights, initial=0))
    for count in range(1, min(most, len(cuts)) + 1):
        ends = []
        for n in range(1, count):
            off = {cut: abs(sums[cut] - n * sums[-1] / count) for cut in cuts}
            ends.append(min(off, key=off.__getitem__))
        stages = {*pairwise([0, *ends, len(weights)])}
        if all(start < end for start, end in stages):
            yield stages
