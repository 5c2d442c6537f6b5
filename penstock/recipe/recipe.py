"""A training run as a value: every choice, with its default and its bounds.

A recipe holds words and numbers only, so that it can be read from TOML and written back; the words
become functions and layers in build.py and tasks/.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from penstock.errors import ConfigError, RecipeError
from penstock.planner.wanted import Wanted
from penstock.schedules import pipedream
from penstock.schedules.names import (
    ASYNCHRONOUS_NAMES,
    SCHEDULE_NAMES,
    least_stages_per_rank,
    named_schedule,
)
from penstock.types import LONGEST_TIMEOUT_S, Recompute

from .data_sections import DataSection, ImageSection, TranslatedSection
from .model_sections import ModelSection
from .optimizer_sections import Cosine, InverseSqrt, LearningRate, Optimizer
from .section import Count, File, Mark, Section, Seed, Share, Words, one_of, variants

PRECISIONS = ("float32", "bfloat16", "float16")


def _check_partition(value: object) -> object:
    if value == "auto":
        return value
    if isinstance(value, list | tuple) and value and all(type(n) is int and n >= 1 for n in value):
        return tuple(value)
    raise ValueError('must be "auto" or a list of the layers of each stage, such as [5, 8]')


def _check_shards(value: object) -> object:
    axes = value if isinstance(value, list | tuple) else [value]
    if axes and all(type(n) is int and n >= 1 for n in axes):
        return tuple(value) if isinstance(value, list | tuple) else value
    raise ValueError("must be a whole number of at least 1, or a list of them, such as [2, 2]")


def _check_sharding(value: object) -> object:
    if isinstance(value, str | Mapping):
        return value
    raise ValueError('must be the name of a ready plan, such as "megatron", or a table of pins')


class PipelineSection(Section):
    """How the model runs."""

    num_stages: Annotated[Count, Mark.PROCESSES]
    """K, the parts the model is cut into."""
    stages_per_rank: Annotated[Count, Mark.PROCESSES] = 1
    """Stages in each thread or process: 2 for zb_v, v_half, v_min, dualpipe_v; 2 or more for
    interleaved_1f1b, breadth_first, wave.  Left out: as few as the schedule has."""
    num_replicas: Annotated[Count, Mark.PROCESSES] = 1
    """D, copies of the pipeline that share the micro-batches; above 1 they are processes."""
    num_shards: Annotated[
        int | tuple[int, ...], BeforeValidator(_check_shards), Mark.PROCESSES
    ] = 1
    """T, processes that share the operators of a stage; several numbers, such as [2, 2], are the
    lengths of the axes along which they are arranged."""
    sharding: Annotated[str | dict[str, Any], BeforeValidator(_check_sharding), Mark.LAYOUT] = (
        "auto"
    )
    """How they are divided: a ready plan (auto, megatron, sequence, grid, data, zero2, zero3,
    expert), also with "+zero1", or a table of weights' names and layouts."""
    num_microbatches: Count
    """M, the parts a batch is cut into; each replica takes M / D of them."""
    shard_optimizer: Annotated[bool, Mark.EXECUTION] = False
    """Let each replica keep slices of weights and optimizer's state between steps (ZeRO-1), as
    "+zero1" after the name in sharding does."""
    partition: Annotated[
        Literal["auto"] | tuple[int, ...], BeforeValidator(_check_partition), Mark.LAYOUT
    ] = "auto"
    """Layers of each stage, such as [5, 8]; auto: balanced by measured time."""
    schedule: Annotated[str, AfterValidator(one_of(list(SCHEDULE_NAMES))), Mark.LAYOUT] = "gpipe"
    """In which order a stage does its forwards and backwards."""
    recompute: Annotated[
        str, AfterValidator(one_of([r.value for r in Recompute])), Mark.EXECUTION
    ] = "stage"
    """stage: keep only what enters a stage, run its forward twice; never: keep everything.  Not
    looked at beside memory_limit_bytes."""
    memory_limit_bytes: Annotated[Count | None, Mark.EXECUTION] = None
    """The most that a rank may keep for its backward passes: decides which layers or stages run
    their forward twice; left out: recompute does."""
    offload: Annotated[bool, Mark.EXECUTION] = False
    """Move what forward passes keep away, and back in time: to the host's memory, on CPUs to
    temporary files.  Beside memory_limit_bytes: only where running twice is not enough."""
    threads_per_stage: Annotated[Count, Mark.EXECUTION] = 1
    """CPU threads inside each operator of a stage; another number may round differently."""
    timeout_s: Annotated[float, Field(gt=0, le=LONGEST_TIMEOUT_S), Mark.EXECUTION] = 600.0
    """Give up when a stage has waited so many seconds for another."""
    seed: Seed = 0
    """Decides what the layers draw, such as dropout masks."""

    @model_validator(mode="before")
    @classmethod
    def _stages_per_rank_are_the_schedules(cls, given: Any) -> Any:
        name = given.get("schedule") if isinstance(given, dict) else None
        if isinstance(name, str) and name in SCHEDULE_NAMES:
            return {"stages_per_rank": least_stages_per_rank(name), **given}
        return given

    @model_validator(mode="after")
    def _replicas_share_microbatches(self) -> Self:
        if self.num_microbatches % self.num_replicas:
            raise ValueError(
                f"pipeline.num_microbatches = {self.num_microbatches} must be a multiple of "
                f"pipeline.num_replicas = {self.num_replicas}, which share them"
            )
        return self

    @property
    def num_ranks(self) -> int:
        """Threads or processes along the pipeline, each with its stages."""
        return self.num_stages // self.stages_per_rank

    @property
    def all_shards(self) -> int:
        """T: processes that share a stage of a replica, along all axes."""
        return prod(self.num_shards) if isinstance(self.num_shards, tuple) else self.num_shards

    @property
    def num_processes(self) -> int:
        """Processes of the run, where it is not one with a thread for each rank."""
        return self.num_ranks * self.num_replicas * self.all_shards

    @property
    def divides(self) -> Wanted | None:
        """How operators and weights are divided; None where each process has its stages whole."""
        if self.all_shards * self.num_replicas == 1:
            return None
        wanted = Wanted.of(self.sharding)
        if self.shard_optimizer and not wanted.gathers:
            wanted = replace(wanted, plan=f"{wanted.plan}+zero1")
        return wanted if self.all_shards > 1 or wanted.gathers else None

    @model_validator(mode="after")
    def _sharding_has_shards(self) -> Self:
        try:
            wanted = Wanted.of(self.sharding)
        except ConfigError as error:
            raise ValueError(f"pipeline.{error}") from None
        if self.all_shards == 1 and wanted != Wanted() and not wanted.gathers:
            raise ValueError(
                f'pipeline.sharding = "{wanted}" divides operators among the shards of a stage, '
                "and pipeline.num_shards is 1; set that to 2 or more, or leave sharding out"
            )
        return self

    @model_validator(mode="after")
    def _schedule_fits_the_stages(self) -> Self:
        try:
            named_schedule(self.schedule, self.num_stages, self.stages_per_rank)
        except ConfigError as error:
            raise ValueError(
                f'pipeline.schedule = "{self.schedule}" with pipeline.num_stages = '
                f"{self.num_stages} and pipeline.stages_per_rank = {self.stages_per_rank}: {error}"
            ) from None
        return self

    @model_validator(mode="after")
    def _partition_has_num_stages(self) -> Self:
        if self.partition != "auto" and len(self.partition) != self.num_stages:
            raise ValueError(
                f"pipeline.partition = {list(self.partition)} has {len(self.partition)} stages, "
                f"pipeline.num_stages is {self.num_stages}; make them agree, "
                'or set partition to "auto"'
            )
        return self


class TrainSection(Section):
    """The loop."""

    epochs: Count
    """How often every training sample is seen."""
    batch_size: Count | None = None
    """Samples of a step, N; the last step of an epoch takes what is left.  Parallel text counts
    tokens instead (data.tokens_per_step), and leaves this out."""
    drop_last: bool = False
    """Leave out the samples of an epoch that do not fill a last step."""
    precision: Annotated[str, AfterValidator(one_of(list(PRECISIONS)))] = "float32"
    """What operators compute in where autocast finds it safe; float16 scales the loss."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Scale gradients down to this norm over the whole model; left out: never."""
    label_smoothing: Share = 0.0
    """Share of each target that is spread evenly over all classes or words."""
    average_decay: Share = 0.0
    """Judge a running average of weights and BatchNorm's statistics, of which so much is kept in
    each step; 0: none."""
    seed: Seed = 0
    """Decides the initial weights, the order of the samples and how they are changed."""
    window: Count = 1
    """Batches that an asynchronous schedule (pipedream, pipedream_2bw) runs one after the other
    without a flush; the weights lag within them."""
    checkpoint_every: Annotated[Count, Mark.EXECUTION] = 100
    """Save after every so many steps; also saved at the end and on Ctrl-C, SIGTERM and SIGHUP."""
    keep_checkpoints: Annotated[Count, Mark.EXECUTION] = 2
    """Keep the newest so many checkpoints, delete the others."""
    average_checkpoints: Count = 1
    """At the end, make what is made of a run of the mean of so many newest checkpoints."""
    log_every: Annotated[Count, Mark.EXECUTION] = 10
    """Write a line of metrics after every so many steps."""
    trace_every: Annotated[Count, Mark.EXECUTION] = 20
    """Time every instruction of one step in so many; shows the bubble."""
    tensorboard: Annotated[bool, Mark.EXECUTION] = False
    """Write the metrics for TensorBoard, too, into the run folder; needs that package."""


def _named_cosine(value: Any) -> Any:
    """Let a learning rate without a name be the usual one."""
    return {"name": "cosine", **value} if isinstance(value, dict) else value


class Start(Section):
    """Where the weights come from, if not from chance: `[start]`."""

    checkpoint: File = ""
    """A run folder, whose newest checkpoint is taken, or a checkpoint; empty: draw all weights."""
    new_layers: Words = ()
    """Layers that begin anew, by the beginning of their parameters' names, such as ["head"]."""


class Recipe(Section):
    """A training run: `penstock train` needs nothing else."""

    model: Annotated[ModelSection, Field(discriminator="name")]
    data: Annotated[DataSection, Field(discriminator="name")]
    pipeline: PipelineSection
    optimizer: Annotated[Optimizer, Field(discriminator="name")]
    learning_rate: Annotated[
        LearningRate, Field(discriminator="name"), BeforeValidator(_named_cosine)
    ] = Cosine()
    train: TrainSection
    start: Start = Start()

    @property
    def batch_size(self) -> int:
        """N, where samples are counted."""
        assert self.train.batch_size is not None
        return self.train.batch_size

    @model_validator(mode="after")
    def _counts_samples_or_tokens(self) -> Self:
        counts_tokens = isinstance(self.data, TranslatedSection)
        if counts_tokens and self.train.batch_size is not None:
            raise ValueError(
                f"train.batch_size = {self.train.batch_size} counts samples, and data.name = "
                f'"{self.data.name}" counts tokens (data.tokens_per_step); leave it out'
            )
        if counts_tokens and self.train.drop_last:
            raise ValueError(
                f'train.drop_last = true with data.name = "{self.data.name}" has nothing to leave '
                "out: steps are made of all texts of an epoch; leave it out itself"
            )
        if not counts_tokens and self.train.batch_size is None:
            raise ValueError("the key train.batch_size is missing")
        return self

    @model_validator(mode="after")
    def _makes_something_of_the_mean(self) -> Self:
        if self.train.average_checkpoints > 1 and isinstance(self.data, ImageSection):
            raise ValueError(
                f"train.average_checkpoints = {self.train.average_checkpoints} with data.name = "
                f'"{self.data.name}" changes nothing: nothing is made of such a run at its end. '
                "Set train.average_decay to judge averaged weights"
            )
        return self

    @model_validator(mode="after")
    def _averages_exist(self) -> Self:
        if self.train.average_checkpoints > self.train.keep_checkpoints:
            raise ValueError(
                f"train.average_checkpoints = {self.train.average_checkpoints} needs "
                f"train.keep_checkpoints = {self.train.keep_checkpoints} to be as high"
            )
        return self

    @model_validator(mode="after")
    def _can_run_so(self) -> Self:
        try:
            check_asynchronous(self)
            check_divided(self)
        except RecipeError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def shortened_warmup(self) -> str:
        """Say that the run ends before its warm-up would; empty if it does not."""
        rate, epochs = self.learning_rate, self.train.epochs
        if isinstance(rate, InverseSqrt) or rate.warmup_epochs < epochs:
            return ""
        return (
            f"learning_rate.warmup_epochs = {rate.warmup_epochs:g} is not less than "
            f"train.epochs = {epochs}: the learning rate rises over the whole run, up to "
            "optimizer.lr, and does not fall"
        )


def check_asynchronous(recipe: Recipe) -> None:
    """Refuse what a schedule that updates weights while it runs cannot do.

    Raises:
        RecipeError: says which key, and why.
    """
    section, train = recipe.pipeline, recipe.train
    schedule = f'pipeline.schedule = "{section.schedule}"'
    if section.schedule not in ASYNCHRONOUS_NAMES:
        if train.window > 1:
            raise RecipeError(
                f"train.window = {train.window} with {schedule} changes nothing: it ends every "
                f"batch with a flush. Choose one of {', '.join(ASYNCHRONOUS_NAMES)}, or make it 1"
            )
        return
    refused = {
        "train.max_grad_norm": (
            train.max_grad_norm is not None,
            "the norm over all stages is not known before the first of them updates",
        ),
        'train.precision = "float16"': (
            train.precision == "float16",
            "whether a gradient of any stage has overflowed is not known before the first of them "
            'updates; "bfloat16" needs no loss scale',
        ),
        "train.average_decay": (
            train.average_decay > 0,
            "the average is taken when all weights are of one update",
        ),
        "train.average_checkpoints": (
            train.average_checkpoints > 1,
            "checkpoints are saved where a window ends, not after so many steps",
        ),
        f"pipeline.num_replicas = {section.num_replicas}": (
            section.num_replicas > 1,
            "every update would have to wait for the gradients of all replicas",
        ),
        f'pipeline.sharding = "{section.divides}"': (
            section.divides is not None
            and (section.divides.gathers or section.divides.plan == "zero2"),
            'weights are gathered once for a step, within which updates change them; "zero3" '
            "gathers them for each layer",
        ),
        f'data.name = "{recipe.data.name}"': (
            isinstance(recipe.data, TranslatedSection)
            and recipe.data.tokens_per_part * 2 <= recipe.data.tokens_per_step,
            "its steps are made of several parts whose gradients add up; set tokens_per_part to "
            "tokens_per_step",
        ),
        'pipeline.partition = "auto"': (
            section.schedule == pipedream.__name__ and section.partition == "auto",
            "how far a layer's weights lag depends on its stage; list the layers of each",
        ),
    }
    for key, (is_asked, reason) in refused.items():
        if is_asked:
            raise RecipeError(f"{key} with {schedule}: {reason}. Change one of the two")


def check_divided(recipe: Recipe) -> None:
    """Refuse what needs whole weights where processes keep slices of them.

    Raises:
        RecipeError: says which keys, and why.
    """
    section, wanted = recipe.pipeline, recipe.pipeline.divides
    gathers = section.shard_optimizer or Wanted.of(section.sharding).gathers
    key = "pipeline.shard_optimizer = true"
    if not section.shard_optimizer:
        key = f'pipeline.sharding = "{wanted or section.sharding}"'
    if gathers and recipe.train.average_decay:
        raise RecipeError(
            f"train.average_decay with {key} is not supported: no replica has all averages. Leave "
            "one of them out"
        )
    cuts = gathers or (wanted is not None and wanted != Wanted("data"))
    if cuts and recipe.optimizer.name == "adafactor":
        raise RecipeError(
            f'{key} with optimizer.name = "adafactor" is not supported: it looks at rows and '
            "columns of whole weights, and a process has slices. Use another optimizer, or leave "
            'out the first (sharding = "data" keeps weights whole)'
        )


def marked_keys(*marks: Mark) -> frozenset[str]:
    """Return the keys that have one of these marks, each as "section.key"."""
    return frozenset(
        f"{section}.{key}"
        for section, field in Recipe.model_fields.items()
        for variant in variants(field)
        for key in variant.marked(*marks)
    )
