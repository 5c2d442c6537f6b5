"""A step as the paper's code runs it, predicted.

All forwards, then all backwards with the last micro-batch first; every stage recomputes every
micro-batch, the last one too (recurrent.py of tensorflow/lingvo):

    stage 0 | f0 f1       R1 B1 R0 B0
    stage 1 |    f0 f1 R1 B1 R0 B0

A recompute needs no gradient, so it runs while that is on its way.  Penstock's own schedule runs
backwards in micro-batch order, so that sums of gradients are those of the unsplit model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from penstock import Cluster, Plan, Profile, Recompute, Timeline, Transport
from penstock.planner.placement import Placement
from penstock.planner.predict import Prediction
from penstock.schedules import gpipe, ir
from penstock.schedules.costs import per_stage
from penstock.schedules.ir import Schedule
from penstock.schedules.passes import add_communication
from penstock.schedules.transfers import Transfer, chain_transfers
from penstock.simulator import simulate
from penstock.simulator.memory import StageWeights, memory_of


def paper_schedule(
    num_stages: int,
    num_microbatches: int,
    transfers: Sequence[Transfer] | None = None,
    *,
    recomputes: bool = True,
) -> Schedule:
    """Write the schedule of the paper's code, with its messages."""
    every = range(num_microbatches)

    def program(stage: int) -> list[ir.Instruction]:
        forwards = [ir.Forward(stage, i, not recomputes) for i in every]
        backwards: list[ir.Instruction] = []
        for i in reversed(every):
            backwards += [ir.Recompute(stage, i)] if recomputes else []
            backwards.append(ir.Backward(stage, i))
        return [*forwards, *backwards]

    schedule = Schedule(tuple(tuple(program(stage)) for stage in range(num_stages)))
    if transfers is None:
        transfers = chain_transfers(num_stages)
    return add_communication(schedule, transfers)


@dataclass(frozen=True)
class Setting:
    """A pipeline of the paper on a cluster; `batch_size` are the samples of a step."""

    profile: Profile
    cluster: Cluster
    partition: tuple[int, ...]
    num_microbatches: int
    batch_size: int
    recomputes: bool = True


class Step:
    """A step of a setting: how long it takes, and where that goes."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        num_stages = len(setting.partition)
        policy = Recompute.STAGE if setting.recomputes else Recompute.NEVER
        plan = Plan(
            layers=setting.profile.layers,
            partition=setting.partition,
            schedule=gpipe,
            num_microbatches=setting.num_microbatches,
            recompute=(policy,) * num_stages,
            placement=Placement.of(range(num_stages)),
            transport=Transport.TORCH_DISTRIBUTED,
        )
        self._predicted = Prediction(plan, setting.profile, setting.cluster, setting.batch_size)

    @cached_property
    def timeline(self) -> Timeline:
        """When each instruction runs; the update of the weights comes after it."""
        predicted, setting = self._predicted, self.setting
        edges = {(a, b) for gradient, a, b in predicted.sharing.num_bytes if not gradient}
        transfers = [Transfer(producer=a, consumer=b) for a, b in sorted(edges)]
        schedule = paper_schedule(
            len(setting.partition),
            setting.num_microbatches,
            transfers,
            recomputes=setting.recomputes,
        )
        return simulate(schedule, predicted.costs, sharing=predicted.sharing)

    @property
    def step_s(self) -> float:
        """Seconds of the step, with the update of the weights."""
        return self.timeline.step_s + self.update_s

    @property
    def update_s(self) -> float:
        """Seconds of the update, after the last backward."""
        return max(self._predicted.optimizer_s)

    @property
    def samples_per_s(self) -> float:
        """What the paper calls throughput."""
        return self.setting.batch_size / self.step_s

    @property
    def accumulation_s(self) -> tuple[float, ...]:
        """Seconds that each stage adds up gradients in, of all micro-batches together."""
        own = self._predicted
        alone = Prediction(  # has nothing to add to
            replace(own.plan, num_microbatches=1),
            own.profile,
            own.cluster,
            own.microbatch_size,
        )
        stages = range(len(self.setting.partition))
        backwards_s = (per_stage(x.costs.backward_s, len(stages), "") for x in (own, alone))
        num = self.setting.num_microbatches
        return tuple(num * float(a - b) for a, b in zip(*backwards_s, strict=True))

    @property
    def activation_bytes(self) -> tuple[int, ...]:
        """What each stage keeps for backwards at its fullest."""
        nothing = [StageWeights()] * len(self.setting.partition)
        memory = memory_of(self.timeline, self._predicted.kept, nothing, {})
        peaks = replace(self.timeline, memory=memory).peak_bytes()
        return tuple(peaks[stage] for stage in sorted(peaks))

    @property
    def weight_bytes(self) -> int:
        """What weights, gradients and the optimizer take on all stages together."""
        return sum(each.total_bytes - each.buffer_bytes for each in self.setting.profile.weights)
