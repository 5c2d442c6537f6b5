"""A candidate of a plan on meshes: lower bounds of its step, its plan, and what the simulator is
given for it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, pairwise

from penstock.schedules.costs import Costs
from penstock.schedules.family import Family
from penstock.schedules.lower import Lowering
from penstock.schedules.transfers import Transfer
from penstock.sharding.request import ShardingRequest
from penstock.simulator.memory import StageWeights, memory_of
from penstock.simulator.simulate import simulate, step_s
from penstock.trace.timeline import Timeline
from penstock.trace.units import count_text
from penstock.types import Recompute, Transport

from .bounds import Load, least_step_s
from .mesh_costs import MeshPrices, OnMesh
from .mesh_task import MeshTask
from .placement import Placement
from .plan import BalancedBy, Plan
from .stage_rows import PredictedStage
from .stage_work import Kinds, StageWork, kinds_of, program_of, work_of
from .submeshes import Answer, hosts_of

_FEW_STAGES = 4
"""Up to which each is described."""
_FEW = 4
"""Micro-batches per stage after which the number in flight stops growing."""


@dataclass(frozen=True)
class OnMeshes:
    """Stages on meshes, a schedule of theirs, and the seconds of a step: by the simulator, and of
    the optimizer after it; if it `is_bound`, those that it takes at least.
    """

    task: MeshTask
    answer: Answer
    family: Family
    prices: MeshPrices
    step_s: float = 0.0
    is_bound: bool = True
    given: str = ""
    """The words of a layout that was given; "" if it was searched."""

    @cached_property
    def stages(self) -> list[OnMesh]:
        """The price of each stage; what goes on to hosts of another kind takes the way there."""
        found = [*map(self.prices.fastest, self.answer.stages, self.in_flight)]
        for n, (before, after) in enumerate(pairwise(self.answer.stages)):
            own, onto = before.submesh, after.submesh
            if onto.kind != own.kind or onto.devices:
                handover_s = self.prices.handover_s(before.end, own, onto.kind, onto.devices)
                found[n] = found[n]._replace(handover_s=handover_s)
        return found

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """The most micro-batches that each stage keeps something of."""
        return most_kept(self.family, len(self.answer.stages), self.prices.num_microbatches)

    @property
    def update_s(self) -> float:
        """The seconds of the optimizer on the device that takes longest, by its bandwidth."""
        num_bytes = Counter[int]()
        for own, places in zip(self.stages, self.answer.devices, strict=True):
            num_bytes.update(dict.fromkeys(places, round(own.update_bytes)))
        device_of = self.prices.cluster.device_of
        return max(size / device_of(place).bytes_per_s for place, size in num_bytes.items())

    def least_s(self) -> float:
        """Return what a step takes at least, with the optimizer."""
        number = self.prices.num_microbatches
        loads, work = [], _work(self.family, len(self.stages), number, self._kinds)
        for n, own in enumerate(self.stages):
            forward_s, is_whole = own.forward_s, not work[n].halves
            busy_s = forward_s + own.backward_s + work[n].recomputes * own.recompute_s
            # of a backward in two parts nobody knows which is waited for
            awaited_s, handover_s = (busy_s, own.handover_s) if is_whole else (forward_s, 0.0)
            times = forward_s, is_whole * own.backward_s, awaited_s, busy_s, handover_s
            loads.append(Load(n, *times, self.in_flight[n]))
        once_s = self.stages[0].once_s  # the first stage is summed after the last backward of all
        return least_step_s(loads, number) + once_s + self.update_s

    def fits(self) -> bool:
        """Tell whether each mesh keeps what the schedule has in flight within its memory."""
        rooms = [host.memory_bytes for host in hosts_of(self.prices.cluster)]
        kept = dict[tuple[int, tuple[int, ...]], float]()
        on = zip(self.answer.stages, self.answer.devices, strict=True)
        for (stage, places), own, number in zip(on, self.stages, self.in_flight, strict=True):
            where, size = (stage.submesh.kind, places), own.microbatch_bytes
            kept[where] = kept.get(where, 0.0) + own.stay_bytes + number * size
        return all(size <= rooms[kind] for (kind, _), size in kept.items())

    def simulated(self) -> "OnMeshes":
        """Return the same with the step of the simulator."""
        how, costs = self.lowered
        program = program_of(how, self.prices.num_microbatches)
        return replace(self, step_s=step_s(program, costs) + self.update_s, is_bound=False)

    @property
    def _kinds(self) -> Kinds:
        """The stages that recompute, and those that do so in part."""
        return kinds_of([own.recompute for own in self.stages], ())

    @cached_property
    def timeline(self) -> Timeline:
        """The predicted step: each rank of it stands for the mesh of a stage, and its memory is
        that of one of the mesh's devices, without messages.
        """
        how, costs = self.lowered
        program = program_of(how, self.prices.num_microbatches)
        timeline = simulate(program.schedule, costs)
        kept = [own.kept for own in self.stages]
        weights = [
            StageWeights(
                weight_bytes=round(own.weight_bytes),
                gradient_bytes=round(own.gradient_bytes),
                optimizer_bytes=round(own.optimizer_bytes),
            )
            for own in self.stages
        ]
        return replace(timeline, memory=memory_of(timeline, kept, weights, {}))

    @cached_property
    def lowered(self) -> tuple[Lowering, Costs]:
        """What the simulator is given: how to make the schedule of the stages, each on the rank
        that stands for its mesh, and what each costs.
        """
        kinds, ranks = self._kinds, self.family.ranks(len(self.stages))
        crossing = [(n, n + 1) for n, (a, b) in enumerate(pairwise(ranks)) if a != b]
        how = Lowering(
            family=self.family,
            ranks=ranks,
            transfers=tuple(Transfer(producer=a, consumer=b) for a, b in crossing),
            recompute=kinds.twice,
            by_layers=kinds.by_layers,
            reduces=any(own.once_s for own in self.stages),
        )
        one_way_s = {
            edge: self.stages[a].handover_s / 2 for a, b in crossing for edge in ((a, b), (b, a))
        }
        forward_s = tuple(own.forward_s for own in self.stages)
        costs = Costs(
            forward_s=forward_s,
            backward_s=tuple(own.backward_s for own in self.stages),
            recompute_s=tuple(own.recompute_s for own in self.stages),
            transfer_s=one_way_s or 0,
            reduce_s=tuple(own.once_s for own in self.stages),
        )
        return how, costs

    # -- how it is told from others -------------------------------------------------------------

    @property
    def decisions(self) -> dict[str, object]:
        """What was decided, by name."""
        return {
            "stages": self.answer.stages,
            "replicas": 1,
            "micro-batches": self.prices.num_microbatches,
            "schedule": self.family.name,
            "sharding": self.prices.plan,
            "recompute": self.recompute_text,
        }

    @property
    def num_devices(self) -> int:
        """Devices that it keeps busy."""
        return len({*chain(*self.answer.devices)})

    @property
    def recompute_text(self) -> str:
        """What stages recompute in words: whole stages, and layers of each."""
        plan, words = self.plan, list[str]()
        if whole := plan.recompute.count(Recompute.STAGE):
            words.append(f"{whole} of {count_text(plan.num_stages, 'stage')}")
        numbers = [len(plan.dropped_layers(stage)) for stage in range(plan.num_stages)]
        if any(numbers):
            words.append(f"{'+'.join(map(str, numbers))} layers")
        priced = ", bytes priced" * any(own.option.policy.byte_s for own in self.stages)
        return (f"recompute {' and '.join(words)}" if words else "no recompute") + priced

    @property
    def peak_bytes(self) -> int:
        """The most that a device keeps."""
        kept = Counter[tuple[int, ...]]()
        for places, own in zip(self.answer.devices, self._predicted(), strict=True):
            kept[places] += own.state_bytes + own.kept_bytes
        return max(kept.values())

    @property
    def stages_text(self) -> str:
        """The stages in words: layers and mesh of each where they are few."""
        shapes = [" x ".join(map(str, own.option.shape)) for own in self.stages]
        counts = [stage.end - stage.start for stage in self.answer.stages]
        if len(shapes) > _FEW_STAGES:
            every = (f"{count_text(n, 'stage')} on {own}" for own, n in Counter(shapes).items())
            return f"{'+'.join(map(str, counts))} layers: {', '.join(every)}"
        pairs = zip(counts, shapes, strict=True)
        return ", ".join(f"{count_text(n, 'layer')} on {shape}" for n, shape in pairs)

    def __str__(self) -> str:
        number = count_text(self.prices.num_microbatches, "micro-batch")
        return f"{self.family.name}, {number}, {self.recompute_text}, {self.stages_text}"

    # -- its plan -------------------------------------------------------------------------------

    @cached_property
    def plan(self) -> Plan:
        task, prices, devices = self.task, self.prices, self.answer.devices
        kinds = tuple(task.cluster.device_of(own[0]).torch_type for own in devices)
        wanted: str | ShardingRequest | None = prices.plan
        if any(own.option.policy.byte_s for own in self.stages):
            least = min(host.memory_bytes for host in hosts_of(task.cluster))
            wanted = ShardingRequest(prices.plan, memory_limit_bytes=int(least))
        is_alone = len(task.cluster.places) == 1
        order = [*dict.fromkeys(devices)]
        places = None if order == sorted(order) else tuple(map(order.index, devices))
        idle = {*range(len(task.cluster.places))} - {*chain(*devices)}
        return Plan(
            layers=tuple(task.model.layers),
            partition=tuple(stage.end - stage.start for stage in self.answer.stages),
            schedule=self.family,
            num_microbatches=prices.num_microbatches,
            recompute=tuple(own.recompute for own in self.stages),
            placement=Placement(
                tuple((own,) for own in devices),
                kinds,
                shard_shapes=tuple(own.option.shape for own in self.stages),
                stage_places=places,
                idle=tuple(sorted(idle)),
            ),
            sharding=wanted if max(map(len, devices)) > 1 else None,
            transport=Transport.THREADS if is_alone else Transport.TORCH_DISTRIBUTED,
            balanced_by=BalancedBy.HAND if self.given else BalancedBy.TIME,
            why=(f"the layout was given: {self.given}",) * bool(self.given),
            predicted_s=tuple(own.seconds for own in self.stages),
            predicted_step_s=self.step_s,
            batch_size=task.batch_size,
            cluster=task.cluster,
            predicted_stages=tuple(self._predicted()),
            layer_factors=prices.factors,
        )

    def _predicted(self) -> Iterator[PredictedStage]:
        """Yield what was predicted of each stage."""
        per_stage = self.answer.stages, self.stages, self.in_flight
        for stage, own, number in zip(*per_stage, strict=True):
            again_bytes = 0.0 if own.recompute is Recompute.NEVER else own.graph_bytes
            kept_bytes = number * own.microbatch_bytes + again_bytes
            # what the last stage gives, the loss takes there
            is_last = stage.end == len(self.prices.names)
            sent_bytes = 0.0 if is_last else self.prices.entering_bytes(stage.end)
            sizes = own.state_bytes, kept_bytes, sent_bytes
            times = own.forward_s, own.backward_s, own.handover_s
            yield PredictedStage(*times, *map(round, sizes))


_NO_KINDS = kinds_of((), ())


@lru_cache(maxsize=64)
def _work(
    family: Family, num_stages: int, num_microbatches: int, kinds: Kinds = _NO_KINDS
) -> tuple[StageWork, ...]:
    """Return the work of each stage, from few micro-batches: a stage that keeps not all of these
    never keeps more.  Of all micro-batches no smaller part is recomputed than of these.
    """
    return work_of(family, num_stages, min(num_microbatches, _FEW * num_stages), *kinds)


def most_kept(family: Family, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Return the most micro-batches that each stage keeps something of."""
    few = min(num_microbatches, _FEW * num_stages)
    kept = (own.most_kept for own in _work(family, num_stages, num_microbatches))
    return tuple(num_microbatches if own == few else own for own in kept)


def sizes_of(candidates: Iterable[OnMeshes]) -> tuple[int, int]:
    """Return the fewest and the most devices that a mesh of these candidates has."""
    sizes = [stage.submesh.size for own in candidates for stage in own.answer.stages]
    return min(sizes), max(sizes)
