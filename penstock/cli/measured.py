"""What the stages of a target cost, measured layer by layer, for `penstock simulate`."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from penstock.automatic.target import Target
from penstock.costs.profile import Profile
from penstock.costs.records import LayerSeconds
from penstock.errors import ConfigError
from penstock.planner.cuts import balance_spans
from penstock.runtime.microbatches import microbatch_sizes
from penstock.schedules.costs import Costs
from penstock.schedules.family import Family
from penstock.schedules.names import named_schedule


@dataclass(frozen=True, slots=True)
class MeasuredStages:
    """A schedule, its number of stages and of a replica's micro-batches, and measured costs."""

    family: Family
    num_stages: int
    num_microbatches: int
    costs: Costs


def measured_stages(target: Target) -> MeasuredStages:
    """Measure a target's layers on a micro-batch, and add them up to its stages; a ConfigError if
    it leaves its stages to the planner, or has too few layers.
    """
    options = target.options
    if not options:
        raise ConfigError(
            f"{target.name} leaves its stages to the planner; `penstock plan` predicts its steps"
        )
    # 1. Measure the layers on the largest micro-batch.
    num_microbatches = options["num_microbatches"]
    size = microbatch_sizes(target.batch_size, num_microbatches)[0]
    profile = target.profile([size])
    layers = _seconds(profile)
    # 2. Cut them into stages: as the target says, or balanced by time.
    partition = options.get("partition")
    if partition is None:
        times_s = [layer.forward_s + layer.backward_s for layer in layers]
        partition = balance_spans([times_s] * options["num_stages"], profile.spans)
    runs = [layers[a:b] for a, b in pairwise(accumulate(partition, initial=0))]

    def sums(name: str) -> tuple[float, ...]:
        return tuple(sum(getattr(layer, name) for layer in run) for run in runs)

    costs = Costs(
        forward_s=sums("forward_s"),
        backward_s=sums("backward_s"),
        recompute_s=sums("recompute_s"),
        backward_input_s=sums("input_s"),
        backward_weight_s=sums("weight_s"),
    )
    # 3. Make the schedule for these costs.
    given: Family = options["schedule"]
    family = named_schedule(given.name, len(runs), given.stages_per_rank, costs)
    return MeasuredStages(family, len(runs), num_microbatches // target.num_replicas, costs)


def _seconds(profile: Profile) -> list[LayerSeconds]:
    (size,) = profile.sizes
    layers = [size.seconds(number) for number in range(len(profile.layers))]
    if size.loss is not None and size.loss.seconds is not None:
        layers[-1] = layers[-1].plus(size.loss.seconds)
    return layers
