"""Fit stages, replicas and shards to the processes of a run: K x D x T, or one with K threads."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from penstock import (
    Mesh,
    Placement,
    Plan,
    Recompute,
    ShardingRequest,
    TiedGradients,
    init_mesh,
    microbatch_sizes,
)
from penstock.errors import ConfigError, PlanError
from penstock.mesh import num_processes
from penstock.trace.units import count_text
from penstock_recipes.errors import RecipeError
from penstock_recipes.recipe.recipe import Recipe


def make_mesh(recipe: Recipe, plan: Plan | None = None) -> Mesh:
    """Connect the processes of the run into the mesh of the recipe, or of a plan.

    Raises:
        RecipeError, PlanError: the recipe, or the plan, needs another number of processes.
        MeshError: the processes do not find each other in time.
    """
    check_layout(recipe, num_processes(), plan)
    section = recipe.pipeline
    if plan is not None and is_uneven(plan.placement) and num_processes() > 1:
        return init_mesh(
            placement=plan.placement, timeout_s=section.timeout_s, device=kind_of(plan)
        )
    sizes = section.num_ranks, section.num_replicas, section.num_shards
    return init_mesh(*sizes, timeout_s=section.timeout_s, device=section.given_device)


def is_uneven(placement: Placement) -> bool:
    """Tell whether recipe keys cannot express a placement.

    Its stages have different meshes, or are not in the order of ranks, or some ranks are idle.
    """
    axes = {placement.shard_axes_of(stage) for stage in range(placement.num_stages)}
    return len(axes) > 1 or placement.stage_places is not None or bool(placement.idle)


def kind_of(plan: Plan) -> str | None:
    """Return the kind of device of a plan; None if there are several."""
    kinds = {name.partition(":")[0] for name in plan.placement.devices}
    return kinds.pop() if len(kinds) == 1 else None


def read_plan(path: Path, overrides: Sequence[str]) -> Plan:
    """Read the plan of a run.

    Raises:
        PlanError: the file does not hold one, or it computes something that a recipe cannot.
        RecipeError: an override changes a key that the plan decides.
    """
    keys = (override.partition("=")[0].strip() for override in overrides)
    decided = [key for key in keys if key.startswith("pipeline.")]
    if decided:
        raise RecipeError(
            f"--plan decides {', '.join(decided)} already; leave out one or the other, or change "
            f"{path}"
        )
    plan = Plan.load(path)
    pools = plan.batch_norm_over_replicas or plan.placement.num_replicas == 1
    if plan.tied_gradients is TiedGradients.PER_MICROBATCH and pools:
        return plan
    raise PlanError(
        f"{path}: a run that goes on in another layout must compute the same; set "
        'tied_gradients to "per micro-batch" and batch_norm_over_replicas to true'
    )


def with_plan(recipe: Recipe, plan: Plan, *, is_own: bool = False) -> Recipe:
    """Return the recipe with the keys of `pipeline` set to the values of a plan.

    If stages have unlike meshes, num_shards is the largest.  With `is_own`, the recipe keeps plan
    = "auto", so that a resumed run plans again.
    """
    section, placement = recipe.pipeline, plan.placement
    num_replicas = placement.num_replicas
    axes = (placement.most_shards,) if is_uneven(placement) else placement.shard_axes
    kinds = [kind.value for kind in set(plan.recompute) if isinstance(kind, Recompute)]
    limits = set(plan.memory_limit_bytes or ())
    # A recipe has one recompute policy and one memory limit for all stages.
    changes = {
        "num_stages": plan.num_stages,
        "stages_per_rank": plan.schedule.stages_per_rank,
        "num_replicas": num_replicas,
        "num_microbatches": plan.num_microbatches * num_replicas,
        "partition": plan.partition,
        "schedule": plan.schedule.name,
        "recompute": kinds[0] if len(kinds) == 1 else section.recompute,
        "memory_limit_bytes": min(limits, default=None),
        "offload": bool(plan.offloading),
        "threads_per_stage": plan.threads_per_stage,
        "timeout_s": plan.timeout_s,
        "seed": plan.seed,
        "num_shards": axes if len(axes) > 1 else axes[0],
        "sharding": "auto" if plan.sharding is None else ShardingRequest.of(plan.sharding).given,
        "shard_optimizer": False,
    }
    if not is_own:
        changes |= {"plan": "", "cluster": "", "measure": False, "device": "auto"}
    return recipe.model_copy(update={"pipeline": section.model_copy(update=changes)})


def check_layout(recipe: Recipe, world_size: int, plan: Plan | None = None) -> None:
    """Refuse stages, replicas and shards that do not fit `world_size` processes.

    Raises:
        RecipeError, PlanError: another number of processes is needed, or the name of the sharding
            plan is unknown.
    """
    section = recipe.pipeline
    if section.divides is not None:
        try:
            section.divides.check()
        except ConfigError as error:
            raise RecipeError(f"pipeline.{error}") from None
    if plan is not None:
        plan.check_ranks(world_size)
        return
    if _fits(recipe, world_size):
        return
    # Describe the wanted layout, then suggest one that fits.
    needed = section.num_processes
    per_rank = section.stages_per_rank
    shards = ""
    if section.all_shards > 1:
        lengths = section.num_shards
        lengths_text = list(lengths) if isinstance(lengths, tuple) else lengths
        shards = f" x pipeline.num_shards = {lengths_text}"
    stages = f"pipeline.num_stages = {section.num_stages}" + (
        f" / pipeline.stages_per_rank = {per_rank}" if per_rank > 1 else ""
    )
    asked = (
        f"{stages} x pipeline.num_replicas = {section.num_replicas}{shards} are "
        f"{count_text(needed, 'process')}"
    )
    if world_size == 1:
        one = "--set pipeline.num_replicas=1" + (" --set pipeline.num_shards=1" if shards else "")
        raise RecipeError(
            f"{asked}, and this is one; start them with --num-processes {needed} or torchrun "
            f"--nproc-per-node {needed}, or {one} to run in one"
        )
    fitting = (world_size * section.num_ranks // needed or world_size) * per_rank
    raise RecipeError(
        f"{asked}, but {world_size} were started; start {needed}, or --set "
        f"pipeline.num_stages={fitting} (and "
        f"pipeline.num_replicas) so that they are {world_size}"
    )


def refit(recipe: Recipe, world_size: int, num_layers: int) -> Recipe:
    """Fit a resumed run to the number of processes, with as few changes as possible.

    It keeps the number of replicas if it can, then the number of shards.  If neither changes, no
    bit of the result does.

    Raises:
        RecipeError: `world_size` processes cannot share the work.
    """
    if _fits(recipe, world_size):
        return recipe
    section = recipe.pipeline
    if world_size == 1:  # with a thread for each stage
        return _with(recipe, section.num_stages, 1, 1)
    # Prefer the most replicas, then the most shards; stages take the rest.
    numbers = range(section.num_replicas, 0, -1), range(section.all_shards, 0, -1)
    for num_replicas, num_shards in product(*numbers):
        num_ranks, rest = divmod(world_size, num_replicas * num_shards)
        num_stages = num_ranks * section.stages_per_rank
        shared = section.num_microbatches % num_replicas == 0
        shared = shared and section.all_shards % num_shards == 0
        if not rest and shared and 1 <= num_stages <= num_layers:
            return _with(recipe, num_stages, num_replicas, num_shards)
    raise RecipeError(
        f"{world_size} processes cannot go on with this run: its model has "
        f"{count_text(num_layers, 'layer')}, so at most {count_text(num_layers, 'stage')}, and "
        f"its {count_text(section.num_microbatches, 'micro-batch')} can be shared by at most "
        f"{count_text(section.num_replicas, 'replica')} as before. Start fewer processes, or "
        "set pipeline.num_stages and pipeline.num_replicas yourself"
    )


def _fits(recipe: Recipe, world_size: int) -> bool:
    section = recipe.pipeline
    if world_size == 1:
        return section.num_replicas * section.all_shards == 1
    return section.num_processes == world_size


def _with(recipe: Recipe, num_stages: int, num_replicas: int, num_shards: int) -> Recipe:
    section = recipe.pipeline
    changes: dict[str, object] = {"num_stages": num_stages, "num_replicas": num_replicas}
    if num_shards != section.all_shards:
        changes["num_shards"] = num_shards
    if num_shards == 1 and not ShardingRequest.of(section.sharding).gathers:
        changes["sharding"] = "auto"
    if num_stages != section.num_stages:
        changes["partition"] = "auto"
    return recipe.model_copy(update={"pipeline": section.model_copy(update=changes)})


def replica_share(
    num_samples: int, num_microbatches: int, num_replicas: int, replica: int
) -> slice:
    """Return the slice of a mini-batch that a replica takes: whole micro-batches, in order.

    `num_microbatches` counts those of the whole mini-batch and is a multiple of `num_replicas`.
    So each micro-batch has the same samples for any number of replicas.
    """
    sizes = microbatch_sizes(num_samples, num_microbatches)
    share, more = divmod(len(sizes), num_replicas)
    ends = [(r + 1) * share + min(r + 1, more) for r in range(num_replicas)]
    first, end = ends[replica - 1] if replica else 0, ends[replica]
    return slice(sum(sizes[:first]), sum(sizes[:end]))


def num_batches(recipe: Recipe, num_samples: int) -> int:
    """Count the mini-batches of an epoch of `num_samples` samples."""
    whole, rest = divmod(num_samples, recipe.batch_size)
    return whole + (rest > 0 and not recipe.train.drop_last)


def smallest_microbatch(recipe: Recipe, num_samples: int) -> int:
    """Return the size of the smallest micro-batch of an epoch, in samples.

    Raises:
        RecipeError: there is no mini-batch, or the last one has too few samples for the replicas.
    """
    size, section = recipe.batch_size, recipe.pipeline
    if not num_batches(recipe, num_samples):
        raise RecipeError(
            f"train.batch_size = {size} with train.drop_last = true leaves no step of "
            f"{count_text(num_samples, 'sample')}"
        )
    last = size if recipe.train.drop_last else num_samples % size or size
    if last < section.num_replicas:
        raise RecipeError(
            f"train.batch_size = {size} leaves {last} of {num_samples} samples for the last step "
            f"of an epoch, fewer than the {section.num_replicas} replicas; choose another "
            "batch size, or set train.drop_last = true"
        )
    return min(microbatch_sizes(last, section.num_microbatches))
