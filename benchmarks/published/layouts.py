"""The step of a given layout: tensor x pipeline x interleaved x data, priced as planned.

    rank r of the pipeline    devices r d t to (r + 1) d t - 1, as d rows of t neighbours
    stage s                   an equal share of the blocks, on rank s mod p
    a micro-batch             d samples, one for each row

Prices of stages and hand-overs are those of the planner (`MeshPrices`), for one ready plan of
sharding on exactly these devices; the simulator runs the interleaved schedule.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from benchmarks.alpa_paper.baselines import RestrictedPrices
from penstock.costs.cluster import Cluster
from penstock.costs.counting.graph import Graph
from penstock.planner.mesh_costs import MemoryPolicy, OnMesh
from penstock.planner.stage_table import Submesh
from penstock.planner.stage_work import made
from penstock.schedules import interleaved_1f1b
from penstock.schedules.costs import Costs
from penstock.schedules.lower import Lowering, lower_unproved
from penstock.schedules.transfers import Transfer
from penstock.simulator.engine import compiled
from penstock.simulator.simulate import step_s


class Layout(NamedTuple):
    """Numbers of devices along tensor, pipeline and data, and stages on a rank of the pipeline."""

    tensor: int
    pipeline: int
    interleaved: int
    data: int

    @property
    def on_rank(self) -> int:
        """Devices of a rank of the pipeline."""
        return self.tensor * self.data

    @property
    def sharding(self) -> str:
        """The ready plan: sequence parallel and a sharded optimizer, as Megatron-LM runs."""
        if self.data == 1:
            return "data" if self.tensor == 1 else "sequence"
        return "zero1" if self.tensor == 1 else "grid+sequence+zero1"

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes of a rank's mesh, data x tensor."""
        return (self.on_rank,) if 1 in (self.tensor, self.data) else (self.data, self.tensor)

    def devices(self, rank: int) -> tuple[int, ...]:
        """Return the devices of a rank of the pipeline, by their numbers in the cluster."""
        return tuple(range(rank * self.on_rank, (rank + 1) * self.on_rank))

    def passes_hosts(self, cluster: Cluster) -> bool:
        """Tell if the devices of some rank of the pipeline are on several hosts."""
        ranks = map(self.devices, range(self.pipeline))
        return any(len({cluster.places[n].host for n in devices}) > 1 for devices in ranks)

    def ends(self, num_blocks: int) -> list[int]:
        """Return the ends of stages in the list of an embedding, blocks and a head."""
        stages = self.pipeline * self.interleaved
        inner = [1 + n * num_blocks // stages for n in range(1, stages)]
        return [0, *inner, num_blocks + 2]


@dataclass(frozen=True)
class _OnDevices(RestrictedPrices):
    """Prices of stages on given devices, which need not begin with a host or fill it."""

    on: tuple[int, ...] = ()

    @cached_property
    def submesh(self) -> Submesh:
        """The mesh of all the devices, over the hosts that they touch."""
        hosts = {self.cluster.places[n].host for n in self.on}
        return Submesh(0, len(hosts), len(self.on))

    def devices(self, submesh: Submesh) -> tuple[int, ...]:
        """Return the given devices; of any other mesh those of the planner."""
        return self.on if submesh == self.submesh else super().devices(submesh)


@dataclass(frozen=True, kw_only=True)
class GivenLayout:
    """A model, its cluster, and the layout to price; `graph` has `data` samples."""

    graph: Graph
    names: Sequence[str]
    cluster: Cluster
    layout: Layout
    num_microbatches: int
    recomputes: bool = False

    def step_s(self) -> float:
        """Return the seconds of a step with the optimizer."""
        p, stages = self.layout.pipeline, self._stages
        how = Lowering(
            family=interleaved_1f1b(self.layout.interleaved),
            ranks=tuple(n % p for n in range(len(stages))),
            transfers=tuple(Transfer(producer=a, consumer=b) for a, b in self._crossing),
            recompute=frozenset(range(len(stages))) if self.recomputes else frozenset(),
        )
        forward_s = tuple(own.forward_s for own in stages)
        one_way_s = {(a, b): stages[a].price.handover_s / 2 for a, b in self._crossing}
        costs = Costs(
            forward_s=forward_s,
            backward_s=tuple(own.backward_s for own in stages),
            recompute_s=forward_s,
            transfer_s=one_way_s or 0,
        )
        program = compiled(lower_unproved(how, self.num_microbatches, make=made))
        return step_s(program, costs) + self._update_s

    @property
    def _crossing(self) -> list[tuple[int, int]]:
        """The neighbouring stages that are on different ranks."""
        return [*pairwise(range(len(self._stages)))] if self.layout.pipeline > 1 else []

    @property
    def _update_s(self) -> float:
        """The seconds of the optimizer on the rank that takes longest, by its bandwidth."""
        p, rate = self.layout.pipeline, self.cluster.device_of(0).bytes_per_s
        sums = (sum(own.update_bytes for own in self._stages[rank::p]) for rank in range(p))
        return max(sums) / rate

    @cached_property
    def _stages(self) -> list[OnMesh]:
        ends = self.layout.ends(len(self.names) - 2)
        prices = [*self._of_ranks()]
        found = []
        for stage, (start, end) in enumerate(pairwise(ends)):
            of_rank = prices[stage % self.layout.pipeline]
            own = of_rank.on_mesh(start, end, of_rank.submesh)
            assert own is not None, "each layer may end a stage, on the one shape of the mesh"
            found.append(own)
        return found

    def _of_ranks(self) -> Iterator[_OnDevices]:
        """Yield the prices of each rank, which ranks share that lie alike on their hosts."""
        known: dict[object, _OnDevices] = {}
        places, spans = self.cluster.places, [(n, n + 1) for n in range(len(self.names))]
        for rank in range(self.layout.pipeline):
            devices = self.layout.devices(rank)
            first = places[devices[0]].host
            alike = tuple((places[n].host - first, places[n].number) for n in devices)
            if alike not in known:
                known[alike] = _OnDevices(
                    graph=self.graph,
                    names=self.names,
                    spans=spans,
                    cluster=self.cluster,
                    num_microbatches=self.num_microbatches,
                    plan=self.layout.sharding,
                    policy=MemoryPolicy(recomputes=self.recomputes),
                    shape=self.layout.shape,
                    on=devices,
                )
            yield known[alike]
