"""A training run as a value: every key, with its default and its bounds.

A recipe holds words and numbers only, so that it can be read from TOML and written back.
build.py and tasks/ turn the words into functions and layers.
"""

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from penstock import ShardingRequest
from penstock.schedules import ASYNCHRONOUS_NAMES, pipedream
from penstock_recipes.errors import RecipeError

from .data_sections import DataSection, ImageSection, TranslatedSection
from .model_sections import ModelSection
from .optimizer_sections import Cosine, InverseSqrt, LearningRate, Optimizer
from .pipeline_section import PipelineSection
from .section import Count, File, Mark, Section, Seed, Share, Words, one_of, variants

PRECISIONS = ("float32", "bfloat16", "float16")
"""The values of train.precision."""


class TrainSection(Section):
    """The training loop."""

    epochs: Annotated[Count, Mark.LENGTH]
    """Passes over the training samples; a resumed run may have more."""
    batch_size: Count | None = None
    """Samples of a step, N; the last step of an epoch takes the rest.  Parallel text counts
    tokens instead (data.tokens_per_step), and leaves this out."""
    drop_last: bool = False
    """Leave out the samples of an epoch that do not fill a last step."""
    precision: Annotated[str, AfterValidator(one_of(list(PRECISIONS)))] = "float32"
    """Dtype of operators under autocast; float16 scales the loss."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Scale gradients down to this norm over the whole model; left out: never."""
    patience: Annotated[Count | None, Mark.LENGTH] = None
    """Evaluations, one after each epoch, without a better main score after which the run ends;
    left out: never."""
    label_smoothing: Share = 0.0
    """Share of each target that is spread evenly over all classes or words."""
    average_decay: Share = 0.0
    """Evaluate a running average of weights and BatchNorm's statistics with this decay per step;
    0: none."""
    seed: Seed = 0
    """Seed of the initial weights, the order of the samples and their augmentation."""
    window: Count = 1
    """Batches that an asynchronous schedule (pipedream, pipedream_2bw) runs one after the other
    without a flush; the weights lag within them."""
    checkpoint_every: Annotated[Count, Mark.EXECUTION] = 100
    """Steps between two checkpoints; the end, Ctrl-C, SIGTERM and SIGHUP save too."""
    keep_checkpoints: Annotated[Count, Mark.EXECUTION] = 2
    """Number of newest checkpoints to keep; the best one is kept beside them."""
    average_checkpoints: Count = 1
    """Number of newest checkpoints whose mean weights make the results at the end of the run."""
    log_every: Annotated[Count, Mark.EXECUTION] = 10
    """Steps between two lines of metrics."""
    trace_every: Annotated[Count, Mark.EXECUTION] = 20
    """Steps between two traced steps, which show the bubble."""
    tensorboard: Annotated[bool, Mark.EXECUTION] = False
    """Write the metrics for TensorBoard, too, into the run folder; needs that package."""


def _named_cosine(value: Any) -> Any:
    """Make cosine the default name of a learning rate."""
    return {"name": "cosine", **value} if isinstance(value, dict) else value


class Start(Section):
    """The source of the first weights, if they are not random: `[start]`."""

    checkpoint: File = ""
    """A run folder, whose newest checkpoint is taken, or a checkpoint; empty: draw all weights."""
    new_layers: Words = ()
    """Layers with new weights, by the beginning of their parameters' names, such as ["head"]."""


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
        """N, the samples of a step, for tasks that count samples."""
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
    def _can_run(self) -> Self:
        # The mean of checkpoints needs a result that uses it, and enough checkpoints.
        if self.train.average_checkpoints > 1 and isinstance(self.data, ImageSection):
            raise ValueError(
                f"train.average_checkpoints = {self.train.average_checkpoints} with data.name = "
                f'"{self.data.name}" changes nothing: nothing is made of such a run at its end. '
                "Set train.average_decay to judge averaged weights"
            )
        if self.train.average_checkpoints > self.train.keep_checkpoints:
            raise ValueError(
                f"train.average_checkpoints = {self.train.average_checkpoints} needs "
                f"train.keep_checkpoints = {self.train.keep_checkpoints} to be as high"
            )
        # The schedule and the sharding support the other keys.
        try:
            check_asynchronous(self)
            check_divided(self)
        except RecipeError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def rate_epochs(self) -> int:
        """The epochs that the learning rate and drop-path are made for."""
        rate = self.learning_rate
        of_rate = None if isinstance(rate, InverseSqrt) else rate.epochs
        return of_rate or self.train.epochs

    @property
    def shortened_warmup(self) -> str:
        """A warning that the warm-up is longer than the run; empty if it is not."""
        rate, epochs = self.learning_rate, self.rate_epochs
        if isinstance(rate, InverseSqrt) or rate.warmup_epochs < epochs:
            return ""
        key = "train.epochs" if rate.epochs is None else "learning_rate.epochs"
        return (
            f"learning_rate.warmup_epochs = {rate.warmup_epochs:g} is not less than "
            f"{key} = {epochs}: the learning rate rises over the whole run, up to "
            "optimizer.lr, and does not fall"
        )


def check_asynchronous(recipe: Recipe) -> None:
    """Refuse keys that do not work with an asynchronous schedule.

    Raises:
        RecipeError: names the key and the reason.
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
    # key -> (is set, reason)
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
    """Refuse keys that need whole weights if the weights are sharded.

    Raises:
        RecipeError: names the keys and the reason.
    """
    section, wanted = recipe.pipeline, recipe.pipeline.divides
    gathers = section.shard_optimizer or ShardingRequest.of(section.sharding).gathers
    key = "pipeline.shard_optimizer = true"
    if not section.shard_optimizer:
        key = f'pipeline.sharding = "{wanted or section.sharding}"'
    if gathers and recipe.train.average_decay:
        raise RecipeError(
            f"train.average_decay with {key} is not supported: no replica has all averages. Leave "
            "one of them out"
        )
    cuts = gathers or (wanted is not None and wanted != ShardingRequest("data"))
    if cuts and recipe.optimizer.name == "adafactor":
        raise RecipeError(
            f'{key} with optimizer.name = "adafactor" is not supported: it looks at rows and '
            "columns of whole weights, and a process has slices. Use another optimizer, or leave "
            'out the first (sharding = "data" keeps weights whole)'
        )


def marked_keys(*marks: Mark) -> frozenset[str]:
    """Return the keys with one of these marks, each as "section.key"."""
    return frozenset(
        f"{section}.{key}"
        for section, field in Recipe.model_fields.items()
        for variant in variants(field)
        for key in variant.marked(*marks)
    )
