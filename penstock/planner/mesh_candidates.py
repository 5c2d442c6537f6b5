"""A candidate of a plan on meshes: lower bounds of its step, its plan, and what the simulator is
given for it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, pairwise, repeat
from operator import attrgetter
from typing import Any

from penstock.schedules import segmented
from penstock.schedules.costs import Costs
from penstock.schedules.family import Family
from penstock.schedules.lower import Lowering
from penstock.schedules.memory import Kept
from penstock.schedules.transfers import Transfer
from penstock.sharding.request import ShardingRequest
from penstock.simulator.memory import StageWeights, memory_of
from penstock.simulator.simulate import simulate, step_s
from penstock.trace.timeline import Timeline
from penstock.trace.units import count_text
from penstock.types import Recompute, Transport

from .bounds import Load, least_step_s
from .mesh_costs import MeshPrices, OnMesh, hosts_of
from .mesh_task import MeshTask
from .placement import Placement
from .plan import BalancedBy, Plan
from .stage_program import Matrix
from .stage_rows import PredictedStage
from .stage_work import StageWork, program_of, work_of
from .submeshes import Answer, Submesh

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
    of_stages: Callable[[Submesh], Matrix]
    """The prices of all stages on a mesh, as the search was given them."""
    step_s: float = 0.0
    is_bound: bool = True
    given: str = ""
    """The words of a layout that was given; "" if it was searched."""

    @cached_property
    def stages(self) -> list[OnMesh]:
        """The price of each stage, with the shape of its mesh."""
        return [*filter(None, (self.prices.on_mesh(*stage) for stage in self.answer.stages))]

    @cached_property
    def segments(self) -> list[list[OnMesh]]:
        """The segments of each stage: itself, where it is not cut further; what goes on to hosts
        of another kind takes the way there.
        """
        pairs = zip(self.answer.stages, self.stages, strict=True)
        found = [self.prices.segments(stage, own.shape) for stage, own in pairs]
        for own, (before, (*_, onto)) in zip(found, pairwise(self.answer.stages), strict=False):
            if onto.kind != before.submesh.kind or onto.devices:
                where = before.submesh, onto.kind, onto.devices
                handover_s = self.prices.handover_s(before.end, *where)
                own[-1] = own[-1]._replace(handover_s=handover_s)
        return found

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """The most micro-batches that each stage keeps something of."""
        return most_kept(self.family, len(self.stages), self.prices.num_microbatches)

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
        loads, work = [], _work(self.family, len(self.stages), self.prices.num_microbatches)
        for n, (stage, parts) in enumerate(zip(self.answer.stages, self.segments, strict=True)):
            forward_s = sum(part.forward_s for part in parts)
            is_whole = not work[n].halves  # else nobody knows which part is waited for
            back_s = is_whole * sum(part.backward_s for part in parts)
            busy_s = float(self.of_stages(stage.submesh)[0, stage.start, stage.end])
            handover_s = parts[-1].handover_s
            awaited_s, handover_s = (busy_s, handover_s) if is_whole else (forward_s, 0.0)
            loads.append(
                Load(n, forward_s, back_s, awaited_s, busy_s, handover_s, self.in_flight[n])
            )
        # the first stage's first segment is summed after the last backward of all
        once_s = self.segments[0][0].once_s
        return least_step_s(loads, self.prices.num_microbatches) + once_s + self.update_s

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

    @cached_property
    def timeline(self) -> Timeline:
        """The predicted step: each rank of it stands for the mesh of a stage, and its memory is
        that of one of the mesh's devices, without messages.
        """
        how, costs = self.lowered
        program = program_of(how, self.prices.num_microbatches)
        timeline = simulate(program.schedule, costs)
        segments, recomputes = [*chain(*self.segments)], self.prices.policy.recomputes
        kept = [
            Kept(
                graph=round(own.graph_bytes),
                inputs=round(own.microbatch_bytes) if recomputes else 0,
                weights=0,
            )
            for own in segments
        ]
        weights = [
            StageWeights(
                weight_bytes=round(own.weight_bytes),
                gradient_bytes=round(own.gradient_bytes),
                optimizer_bytes=round(own.optimizer_bytes),
            )
            for own in segments
        ]
        return replace(timeline, memory=memory_of(timeline, kept, weights, {}))

    @property
    def schedule(self) -> Family:
        """The schedule of all segments."""
        sizes = tuple(map(len, self.segments))
        return segmented(sizes, self.family) if max(sizes) > 1 else self.family

    @cached_property
    def lowered(self) -> tuple[Lowering, Costs]:
        """What the simulator is given: how to make the schedule of the segments of all stages,
        each on the rank that stands for its mesh, and what each costs.
        """
        segments = [*chain(*self.segments)]
        count, family = len(segments), self.schedule
        ranks = family.ranks(count)
        crossing = [(n, n + 1) for n in range(count - 1) if ranks[n] != ranks[n + 1]]
        how = Lowering(
            family=family,
            ranks=ranks,
            transfers=tuple(Transfer(producer=a, consumer=b) for a, b in crossing),
            recompute=frozenset(range(count)) if self.prices.policy.recomputes else frozenset(),
            reduces=any(segment.once_s for segment in segments),
        )
        one_way_s = {
            edge: segments[a].handover_s / 2 for a, b in crossing for edge in ((a, b), (b, a))
        }
        forward_s = tuple(segment.forward_s for segment in segments)
        costs = Costs(
            forward_s=forward_s,
            backward_s=tuple(segment.backward_s for segment in segments),
            recompute_s=forward_s,
            transfer_s=one_way_s or 0,
            reduce_s=tuple(segment.once_s for segment in segments),
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
        """The memory policy in words."""
        return str(self.prices.policy)

    @property
    def peak_bytes(self) -> int:
        """The most that a device keeps."""
        parts, kept = iter(self._predicted()), Counter[tuple[int, ...]]()
        for places, segments in zip(self.answer.devices, self.segments, strict=True):
            each = [next(parts) for _ in segments]
            kept[places] += sum(own.state_bytes + own.kept_bytes for own in each)
        return max(kept.values())

    @property
    def stages_text(self) -> str:
        """The stages in words: layers and mesh of each where they are few."""
        shapes = [" x ".join(map(str, own.shape)) for own in self.stages]
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
        task, prices, sizes = self.task, self.prices, [*map(len, self.segments)]

        def spread(of_stages: Sequence[Any]) -> tuple[Any, ...]:
            """Return for each segment what its stage has."""
            return tuple(chain(*map(repeat, of_stages, sizes)))

        devices = self.answer.devices
        kinds = [task.cluster.device_of(own[0]).torch_type for own in devices]
        recompute = Recompute.STAGE if prices.policy.recomputes else Recompute.NEVER
        wanted: str | ShardingRequest | None = prices.plan
        if prices.policy.byte_s:
            least = min(host.memory_bytes for host in hosts_of(task.cluster))
            wanted = ShardingRequest(prices.plan, memory_limit_bytes=int(least))
        is_alone = len(task.cluster.places) == 1
        order = [*dict.fromkeys(devices)]
        places = None if order == sorted(order) else spread([*map(order.index, devices)])
        idle = {*range(len(task.cluster.places))} - {*chain(*devices)}
        return Plan(
            layers=tuple(task.model.layers),
            partition=tuple(own.num_layers for own in chain(*self.segments)),
            schedule=self.schedule,
            num_microbatches=prices.num_microbatches,
            recompute=(recompute,) * sum(sizes),
            placement=Placement(
                spread([(own,) for own in devices]),
                spread(kinds),
                shard_shapes=spread([own.shape for own in self.stages]),
                stage_places=places,
                idle=tuple(sorted(idle)),
            ),
            sharding=wanted if max(map(len, devices)) > 1 else None,
            transport=Transport.THREADS if is_alone else Transport.TORCH_DISTRIBUTED,
            balanced_by=BalancedBy.HAND if self.given else BalancedBy.TIME,
            why=(f"the layout was given: {self.given}",) * bool(self.given),
            predicted_s=tuple(own.seconds for own in chain(*self.segments)),
            predicted_step_s=self.step_s,
            batch_size=task.batch_size,
            cluster=task.cluster,
            predicted_stages=tuple(self._predicted()),
            layer_factors=prices.factors,
        )

    def _predicted(self) -> Iterator[PredictedStage]:
        """Yield what was predicted of each segment; a stage's largest graph is that of one."""
        prices, per_stage = self.prices, (self.answer.stages, self.segments, self.in_flight)
        for stage, segments, number in zip(*per_stage, strict=True):
            largest = max(segments, key=attrgetter("graph_bytes"))
            for own in segments:
                is_last = own is segments[-1]
                kept = number * own.microbatch_bytes
                kept += own.graph_bytes if prices.policy.recomputes and own is largest else 0
                sent = prices.entering_bytes(stage.end) if is_last else 0
                yield PredictedStage(
                    own.forward_s,
                    own.backward_s,
                    own.handover_s if is_last else 0.0,
                    *(round(size) for size in (own.state_bytes, kept, sent)),
                )


@lru_cache(maxsize=64)
def _work(family: Family, num_stages: int, num_microbatches: int) -> tuple[StageWork, ...]:
    """Return the work of each stage, from few micro-batches: a stage that keeps not all of these
    never keeps more.
    """
    return work_of(family, num_stages, min(num_microbatches, _FEW * num_stages))


def most_kept(family: Family, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Return the most micro-batches that each stage keeps something of."""
    few = min(num_microbatches, _FEW * num_stages)
    kept = (own.most_kept for own in _work(family, num_stages, num_microbatches))
    return tuple(num_microbatches if own == few else own for own in kept)
