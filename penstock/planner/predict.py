"""Predict the timeline and the memory of a step, from a plan, a profile and a cluster.

The schedule is the one that the executor would run, lowered by the same function.  One replica is
simulated; the others run alike beside it, and share cores and links with it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

from penstock.costs.cluster import Cluster
from penstock.costs.profile import Profile
from penstock.costs.records import LayerSeconds
from penstock.errors import ConfigError, PlanError
from penstock.schedules.costs import Costs
from penstock.schedules.ir import BackwardInput, Schedule
from penstock.schedules.lower import Lowering, lower, lower_unproved
from penstock.schedules.memory import Kept
from penstock.schedules.transfers import Transfer
from penstock.simulator import Sharing, Way, simulate
from penstock.simulator.engine import Edge
from penstock.simulator.memory import StageWeights, memory_of
from penstock.simulator.simulate import step_s
from penstock.trace.timeline import Timeline
from penstock.trace.units import count_text

from .plan import Plan
from .pricing import Pricing, commit_seconds, weights_together
from .shared_cores import shared_cores
from .stage_bytes import Message, StageBytes
from .stage_work import made, program_of


def costs_of(runs: Sequence[Sequence[LayerSeconds]]) -> Costs:
    """Return the costs of stages by the seconds of their layers, of which a recompute runs all."""

    def sums(name: str) -> tuple[float, ...]:
        return tuple(sum(getattr(layer, name) for layer in run) for run in runs)

    return Costs(
        forward_s=sums("forward_s"),
        backward_s=sums("backward_s"),
        recompute_s=sums("recompute_s"),
        backward_input_s=sums("input_s"),
        backward_weight_s=sums("weight_s"),
    )


@dataclass(frozen=True)
class Prediction:
    """A predicted step, and the plan, profile and cluster that it depends on.

    Rank r of the plan runs on device r of the cluster; on a host whose ranks share cores
    (`busy_speed`), ranks beyond its devices begin with the first again.  `batch_size` are the
    samples of a step over all replicas; left out, those that the plan was made for.  The timeline
    ends before the optimizer; `optimizer_s` has its seconds.

    Raises:
        PlanError: the plan is of another model than the profile; names the first layer.
        ConfigError: the cluster has too few devices, or the batch does not fit the plan.
    """

    plan: Plan
    profile: Profile
    cluster: Cluster
    batch_size: int | None = None
    shared: Pricing | None = field(default=None, compare=False, repr=False)
    """Prices of the same profile and cluster, which several plans share."""

    def __post_init__(self) -> None:
        if self.batch_size is None:
            object.__setattr__(self, "batch_size", self.plan.batch_size)
        if self.shared is None:
            self.plan.check_model(self.profile.layers)
            pricing = Pricing(self.profile, self.cluster)
            object.__setattr__(self, "shared", pricing)
        cluster = self.pricing.cluster
        if self.plan.transport.is_between_processes:
            cluster = self.pricing.between_processes
        object.__setattr__(self, "cluster", cluster)

    @property
    def pricing(self) -> Pricing:
        """The costs of the layers on the cluster."""
        assert self.shared is not None, "made where none was given"
        return self.shared

    @cached_property
    def timeline(self) -> Timeline:
        """When each instruction runs, and what each stage holds."""
        timeline = simulate(self.schedule, self.costs, sharing=self.sharing)
        memory = memory_of(timeline, self.kept, self.weights, self.sharing.num_bytes)
        return replace(timeline, memory=memory)

    @property
    def step_s(self) -> float:
        """Seconds of the step with the optimizer."""
        return self.timeline.step_s + self.update_s

    @property
    def update_s(self) -> float:
        """Seconds of the update after the step.

        Processes and accelerators update their weights at the same time.  The ranks of one process
        on CPUs update one after the other.
        """
        is_one_after_another = (
            not self.plan.transport.is_between_processes
            and self.cluster.device_of(self.places[0]).torch_type == "cpu"
        )
        return sum(self.optimizer_s) if is_one_after_another else max(self.optimizer_s)

    @property
    def optimizer_s(self) -> tuple[float, ...]:
        """Seconds of the update on each rank of a replica, after the step."""
        of_ranks = [0.0] * self.plan.placement.num_places
        for stage, place in enumerate(self.plan.placement.places):
            moved = [layer.moved_bytes for layer in self.profile.weights[self._runs[stage]]]
            devices = map(self.cluster.device_of, self._places_of(stage))
            rates = {device.bytes_per_s for device in devices}
            of_ranks[place] += max(sum(n / rate for n in moved) for rate in rates)
        return tuple(of_ranks)

    @property
    def schedule(self) -> Schedule:
        """The schedule that the executor would run, proved."""
        return lower(self._lowering, self.plan.num_microbatches)

    @property
    def quick_step_s(self) -> float:
        """`step_s`, to the last bit, but faster: without a proof and a timeline."""
        program = program_of(self._lowering, self.plan.num_microbatches)
        return step_s(program, self.costs, self.sharing) + self.update_s

    @cached_property
    def _lowering(self) -> Lowering:
        plan = self.plan
        edges = {(m.transfer.producer, m.transfer.consumer) for m in self._messages}
        return Lowering(
            family=plan.schedule,
            ranks=plan.placement.places,
            transfers=tuple(Transfer(producer=a, consumer=b) for a, b in sorted(edges)),
            recompute=plan.recomputing,
            by_layers=plan.by_layers,
            commits=tuple(
                stage
                for stage, run in enumerate(self._runs)
                if any(layer.num_norms for layer in self.profile.weights[run])
            ),
            offload=plan.offloading,
            posts=plan.transport.is_between_processes,
            reduces=plan.placement.num_replicas > 1,
        )

    @cached_property
    def microbatch_size(self) -> int:
        """Samples of the largest micro-batch; a ConfigError if that is not known, or too few."""
        plan, sizes = self.plan, self.profile.sizes
        num_parts = plan.num_microbatches * plan.placement.num_replicas
        batch_size = self.batch_size
        if batch_size is None:
            if len(sizes) > 1:
                raise ConfigError(
                    "batch_size is not known: the profile has several micro-batch sizes; give "
                    "the samples of a step, over all replicas"
                )
            return sizes[0].microbatch_size
        if batch_size < num_parts:
            raise ConfigError(
                f"batch_size={batch_size} for "
                f"{count_text(plan.placement.num_replicas, 'replica')} of "
                f"{count_text(plan.num_microbatches, 'micro-batch')}: each needs a sample; "
                f"give at least {num_parts}, or fewer replicas or micro-batches"
            )
        return -(-batch_size // num_parts)

    @cached_property
    def costs(self) -> Costs:
        """Seconds of each instruction on each stage."""
        stages = range(self.plan.num_stages)
        layers = [self._seconds_of(stage) for stage in stages]
        starts = [run.start for run in self._runs]
        # A stage runs only its recomputed layers again.
        again = (
            sum(layers[stage][n - starts[stage]].recompute_s for n in self.plan.recomputed(stage))
            for stage in stages
        )
        return replace(
            costs_of(layers),
            recompute_s=tuple(again),
            reduce_s=tuple(self._reduce_s(stage) for stage in stages),
            commit_s=tuple(self._commit_s(stage) for stage in stages),
            offload_s=(moving_s := tuple(self._moving_s(stage) for stage in stages)),
            fetch_s=moving_s,
        )

    @cached_property
    def kept(self) -> tuple[Kept, ...]:
        """Bytes that each stage keeps of one micro-batch."""
        divides: Iterable[int] = ()
        if self.plan.by_layers:
            schedule = lower_unproved(self._lowering, self.plan.num_microbatches, make=made)
            divides = (x.stage for x in schedule.instructions if isinstance(x, BackwardInput))
        return self._bytes.kept_by(self.plan.partition, self.plan.recompute, set(divides))

    @cached_property
    def weights(self) -> tuple[StageWeights, ...]:
        """Bytes of each stage's weights, gradients and optimizer state."""
        return tuple(
            StageWeights(
                weight_bytes=layer_sums.parameter_bytes + layer_sums.buffer_bytes,
                gradient_bytes=layer_sums.gradient_bytes,
                optimizer_bytes=layer_sums.optimizer_bytes,
                version_bytes=layer_sums.gradient_bytes,
            )
            for layer_sums in (weights_together(self.profile.weights[run]) for run in self._runs)
        )

    @cached_property
    def sharing(self) -> Sharing:
        """The routes of messages, and the cores that ranks share."""
        num_bytes: dict[Edge, int] = {}
        for message in self._messages:
            a, b = message.transfer.producer, message.transfer.consumer
            num_bytes[False, a, b] = message.num_bytes
            num_bytes[True, b, a] = message.gradient_bytes

        def way_of(edge: Edge) -> Way:
            return self._way(edge, num_bytes.get(edge, 0))

        busy = self.pricing.busy_speed(self.microbatch_size)
        pools = shared_cores(self.plan, self.cluster, self.places, busy)
        return Sharing(way_of=way_of, num_bytes=num_bytes, pools=pools)

    @cached_property
    def _runs(self) -> list[slice]:
        return [slice(a, b) for a, b in pairwise(accumulate(self.plan.partition, initial=0))]

    @cached_property
    def _bytes(self) -> StageBytes:
        between = self.plan.transport.is_between_processes
        kind = self.cluster.places[self.places[0]].kind
        return self.pricing.bytes(kind, self.microbatch_size, copies_weights=between)

    @cached_property
    def _messages(self) -> tuple[Message, ...]:
        return self._bytes.messages(self.plan.partition)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The device of the cluster that each rank is on.

        Raises:
            PlanError: there are too few.
        """
        if self.plan.placement.cluster_places is not None:
            return self.plan.placement.cluster_places
        places: list[int] = []
        num_ranks, num_devices = self.plan.placement.num_ranks, len(self.cluster.places)
        for rank in range(num_ranks):
            place = rank % num_devices
            if rank >= num_devices and not self.cluster.host_of(place).busy_speed:
                raise PlanError(
                    f"the plan is for {count_text(num_ranks, 'rank')}, and the cluster "
                    f"{self.cluster.name} has {count_text(num_devices, 'device')}; make a plan "
                    "for this cluster, or give another one"
                )
            places.append(place)
        return tuple(places)

    def _places_of(self, stage: int) -> list[int]:
        return [self.places[rank] for row in self.plan.placement.ranks[stage] for rank in row]

    def _seconds_of(self, stage: int) -> tuple[LayerSeconds, ...]:
        """Return the seconds of a stage's layers on the slowest device that runs it."""
        run, size = self._runs[stage], (self.microbatch_size, self.plan.num_microbatches)
        kinds = dict.fromkeys(self.cluster.places[p].kind for p in self._places_of(stage))
        on_kinds = (self.pricing.seconds(kind, *size)[run] for kind in kinds)
        return max(on_kinds, key=lambda layers: sum(x.forward_s + x.backward_s for x in layers))

    def _reduce_s(self, stage: int) -> float:
        """Return the seconds of a stage's gradient sums over replicas."""
        weights = weights_together(self.profile.weights[self._runs[stage]])
        ranks = [row[0] for row in self.plan.placement.ranks[stage]]
        group, num_bytes = sorted({self.places[rank] for rank in ranks}), weights.gradient_bytes
        if len(group) == 1 or not num_bytes:
            return 0.0
        processes = self.plan.transport.is_between_processes
        return self.pricing.sum_s(tuple(group), num_bytes, processes=processes)

    def _commit_s(self, stage: int) -> float:
        weights = weights_together(self.profile.weights[self._runs[stage]])
        device = self.cluster.device_of(self._places_of(stage)[0])
        return commit_seconds(weights.num_norms, device, self.plan.num_microbatches)

    def _moving_s(self, stage: int) -> float:
        if not self.plan.offload[stage]:
            return 0.0
        device = self.cluster.device_of(self._places_of(stage)[0])
        if device.host_bytes_per_s is None:
            raise ConfigError(
                f"the plan offloads stage {stage}, and device {device.name!r} of the cluster "
                f"{self.cluster.name} has no host_bytes_per_s; give it, or plan without offload"
            )
        kept, keeps_graph = self.kept[stage], stage not in self.plan.recomputing
        return kept.moves(keeps_graph=keeps_graph) / device.host_bytes_per_s

    def _way(self, edge: Edge, num_bytes: int) -> Way:
        """Return the route and the seconds of a message; replicas share its lanes."""
        _, source, target = edge
        placement = self.plan.placement
        routes = [
            self.cluster.route(
                self.places[placement.rank_of(source, replica)],
                self.places[placement.rank_of(target, replica)],
            )
            for replica in range(placement.num_replicas)
        ]
        users = Counter(lane for route in routes for lane in route.lanes)
        first = routes[0]
        shared = max((users[lane] for lane in first.lanes), default=1)
        return Way(
            lanes=first.lanes,
            lane_s=num_bytes / first.bytes_per_s * shared,
            latency_s=first.latency_s,
            send_s=first.busy_s(num_bytes),
            receive_s=first.busy_s(num_bytes),
            blocks=first.blocks,
        )
