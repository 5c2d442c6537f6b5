"""A training run as a value: every choice, with its default and its bounds.

A recipe holds words and numbers only, so that it can be read from TOML and written back; the words
become functions and layers in build.py.
"""

from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from penstock.errors import ConfigError
from penstock.schedules.names import SCHEDULE_NAMES, named_schedule
from penstock.types import Recompute

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0)]
PRECISIONS = ("float32", "bfloat16", "float16")
Share = Annotated[float, Field(ge=0, lt=1)]


def _one_of(words: list[str]) -> Callable[[str], str]:
    def check(word: str) -> str:
        if word not in words:
            raise ValueError("must be " + " or ".join(f'"{known}"' for known in words))
        return word

    return check


def _check_partition(value: object) -> object:
    if value == "auto":
        return value
    if isinstance(value, list | tuple) and value and all(type(n) is int and n >= 1 for n in value):
        return tuple(value)
    raise ValueError('must be "auto" or a list of the layers of each stage, such as [5, 8]')


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class ModelSection(Section):
    """The network."""

    name: Literal["residual"]
    """Which of the zoo: residual, a small residual convolution network."""
    num_blocks: Annotated[int, Field(ge=0)] = 4
    """Residual blocks of two convolutions each."""
    width: Count = 32
    """Channels of the first half of the blocks; the second half has twice as many."""
    dropout: Share = 0.2
    """Share of the features that is dropped before the head."""


class DataSection(Section):
    """The samples."""

    name: Literal["digits"]
    """Which data: digits, the 1,797 handwritten digits that ship with scikit-learn."""
    test_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of each class that is set aside for testing."""
    max_shift: Annotated[int, Field(ge=0, le=4)] = 1
    """Training images move by up to so many pixels, anew in every epoch."""
    seed: Seed = 0
    """Decides the split into training and test samples."""


class PipelineSection(Section):
    """How the model runs."""

    num_stages: Count
    """K, the parts the model is cut into."""
    stages_per_rank: Count = 1
    """Stages in each thread or process, with the schedule interleaved_1f1b: smaller bubbles."""
    num_replicas: Count = 1
    """D, copies of the pipeline that share the micro-batches; above 1 they are processes."""
    num_microbatches: Count
    """M, the parts a batch is cut into; each replica takes M / D of them."""
    shard_optimizer: bool = False
    """Let the replicas share out the optimizer's state (ZeRO, stage 1): less memory, same bits."""
    partition: Annotated[Literal["auto"] | tuple[int, ...], BeforeValidator(_check_partition)] = (
        "auto"
    )
    """Layers of each stage, such as [5, 8]; auto: balanced by measured time."""
    schedule: Annotated[str, AfterValidator(_one_of(list(SCHEDULE_NAMES)))] = "gpipe"
    """In which order a stage does its forwards and backwards."""
    recompute: Annotated[str, AfterValidator(_one_of([r.value for r in Recompute]))] = "stage"
    """stage: keep only what enters a stage, run its forward twice; never: keep everything."""
    threads_per_stage: Count = 1
    """CPU threads inside each operator of a stage; another number may round differently."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Give up when a stage has waited so many seconds for another."""
    seed: Seed = 0
    """Decides what the layers draw, such as dropout masks."""

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
        """Threads or processes of a replica."""
        return self.num_stages // self.stages_per_rank

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


class AdamW(Section):
    """Adam with decoupled weight decay."""

    name: Literal["adamw"]
    """adamw."""
    lr: Annotated[float, Field(gt=0)]
    """Highest learning rate, reached after the warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Share of a weight that is taken off it per step, times the learning rate."""
    beta1: Share = 0.9
    """How long the mean of the gradient remembers."""
    beta2: Share = 0.999
    """How long the mean of its square remembers."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator."""


class SGD(Section):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"]
    """sgd."""
    lr: Annotated[float, Field(gt=0)]
    """Highest learning rate, reached after the warm-up."""
    momentum: Share = 0.9
    """How long the mean of the gradients remembers."""
    nesterov: bool = False
    """Look ahead by one step of momentum."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Share of a weight that is added to its gradient."""

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError("optimizer.nesterov = true needs optimizer.momentum above 0")
        return self


class LearningRateSection(Section):
    """The learning rate over time: up in a line, down in half a cosine."""

    warmup_epochs: Annotated[float, Field(ge=0)] = 0.0
    """Epochs in which it rises from near zero to optimizer.lr."""
    final_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of optimizer.lr that is left at the end."""


class TrainSection(Section):
    """The loop."""

    epochs: Count
    """How often every training sample is seen."""
    batch_size: Count
    """Samples of a step, N; the last step of an epoch takes what is left."""
    precision: Annotated[str, AfterValidator(_one_of(list(PRECISIONS)))] = "float32"
    """What operators compute in where autocast finds it safe; float16 scales the loss."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Scale gradients down to this norm over the whole model; left out: never."""
    seed: Seed = 0
    """Decides the initial weights, the order of the samples and their shifts."""
    checkpoint_every: Count = 100
    """Save after every so many steps; also saved at the end and on Ctrl-C."""
    keep_checkpoints: Count = 2
    """Keep the newest so many checkpoints, delete the others."""
    log_every: Count = 10
    """Write a line of metrics after every so many steps."""
    trace_every: Count = 20
    """Time every instruction of one step in so many; shows the bubble."""


class Recipe(Section):
    """A training run: `penstock train` needs nothing else."""

    model: ModelSection
    data: DataSection
    pipeline: PipelineSection
    optimizer: Annotated[AdamW | SGD, Field(discriminator="name")]
    learning_rate: LearningRateSection = LearningRateSection()
    train: TrainSection

    @model_validator(mode="after")
    def _warmup_ends(self) -> Self:
        if self.learning_rate.warmup_epochs >= self.train.epochs:
            raise ValueError(
                f"learning_rate.warmup_epochs = {self.learning_rate.warmup_epochs:g} must be less "
                f"than train.epochs = {self.train.epochs}"
            )
        return self
