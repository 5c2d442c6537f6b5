"""The pipeline of a recipe: `[pipeline]`."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from penstock import Recompute, ShardingRequest
from penstock.errors import ConfigError
from penstock.schedules import (
    SCHEDULE_NAMES,
    least_stages_per_rank,
    named_schedule,
    one_f_one_b,
    schedule_name,
)

from .section import Count, File, Mark, Section, Seed, one_of

BESIDE_AUTO = frozenset(
    (
        *("plan", "cluster", "measure", "num_microbatches", "threads_per_stage", "timeout_s"),
        *("seed", "compile"),
    )
)
"""The keys that a recipe may still set with plan = "auto"."""


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


def _check_device(value: str) -> str:
    if re.fullmatch(r"[a-z]+(:\d+)?", value):
        return value
    raise ValueError('must be "auto", or a device such as "cpu", "cuda" or "cuda:1"')


class PipelineSection(Section):
    """The parallel execution of the model."""

    plan: Annotated[Literal["", "auto"], Mark.LAYOUT] = ""
    """auto: each start plans for the available processes, also on meshes of different sizes
    (docs/planning.md), and sets all keys that a plan decides; empty: these keys decide."""
    cluster: Annotated[File, Mark.LAYOUT] = ""
    """Cluster for plan = "auto": a file or a preset, such as "dgx-a100", with a device for each
    process, in the order of ranks; empty: this machine, measured."""
    measure: Annotated[bool, Mark.LAYOUT] = False
    """Measure the layers on one such device for plan = "auto"; otherwise their times are
    estimated."""
    device: Annotated[str, AfterValidator(_check_device), Mark.EXECUTION] = "auto"
    """auto: an accelerator for each rank, that of LOCAL_RANK under torchrun, or the CPU if there
    is none; else a kind or a device, such as "cpu", "cuda" or "cuda:1"."""
    num_stages: Annotated[Count, Mark.PROCESSES] = 1
    """K, the number of stages; required without plan = "auto"."""
    stages_per_rank: Annotated[Count, Mark.PROCESSES] = 1
    """Stages in each thread or process: 2 for zb_v, v_half, v_min, dualpipe_v; 2 or more for
    interleaved_1f1b, breadth_first, wave.  Left out: as few as the schedule has."""
    num_replicas: Annotated[Count, Mark.PROCESSES] = 1
    """D, copies of the pipeline that share the micro-batches; above 1 they are processes."""
    num_shards: Annotated[
        int | tuple[int, ...], BeforeValidator(_check_shards), Mark.PROCESSES
    ] = 1
    """T, processes that share a stage; several numbers, such as [2, 2], are the lengths of the
    axes of its mesh."""
    sharding: Annotated[str | dict[str, Any], BeforeValidator(_check_sharding), Mark.LAYOUT] = (
        "auto"
    )
    """Layouts of operators: a ready plan (auto, megatron, sequence, grid, grid+sequence, context,
    data, zero2, zero3, expert), also with "+zero1", or a table of weights' names and layouts."""
    num_microbatches: Count = 1
    """M, the number of micro-batches; each replica takes M / D of them.  Required without plan =
    "auto", which keeps to a given number."""
    shard_optimizer: Annotated[bool, Mark.EXECUTION] = False
    """Let each replica keep slices of weights and optimizer's state between steps (ZeRO-1), as
    "+zero1" after the name in sharding does."""
    partition: Annotated[
        Literal["auto"] | tuple[int, ...], BeforeValidator(_check_partition), Mark.LAYOUT
    ] = "auto"
    """Layers of each stage, such as [5, 8]; auto: balanced by measured time."""
    schedule: Annotated[str, AfterValidator(one_of(list(SCHEDULE_NAMES))), Mark.LAYOUT] = (
        one_f_one_b.name
    )
    """The order of forwards and backwards."""
    recompute: Annotated[
        str, AfterValidator(one_of([r.value for r in Recompute])), Mark.EXECUTION
    ] = "stage"
    """stage: keep only what enters a stage, run its forward twice; layers: likewise for each
    layer; never: keep everything.  Not looked at beside memory_limit_bytes."""
    memory_limit_bytes: Annotated[Count | None, Mark.EXECUTION] = None
    """Limit of activation memory of a rank, which decides the recomputed layers or stages; left
    out: recompute decides."""
    offload: Annotated[bool, Mark.EXECUTION] = False
    """Move activation memory to the host's memory, on CPUs to temporary files, and back in
    time.  Beside memory_limit_bytes: only if recompute is not enough."""
    threads_per_stage: Annotated[Count, Mark.EXECUTION] = 1
    """CPU threads inside each operator of a stage; another number may round differently."""
    compile: Annotated[bool, Mark.EXECUTION] = False
    """Compile each layer with torch.compile; the bits are those of the compiled model."""
    timeout_s: Annotated[float, Field(gt=0, le=365 * 24 * 3600), Mark.EXECUTION] = 600.0
    """Longest wait of a stage for another, in seconds."""
    seed: Seed = 0
    """Seed of the random numbers of layers, such as dropout masks."""

    @model_validator(mode="before")
    @classmethod
    def _stages_per_rank_are_the_schedules(cls, given: Any) -> Any:
        name = given.get("schedule") if isinstance(given, dict) else None
        if not isinstance(name, str):
            return given
        with suppress(ConfigError):  # the field itself says which names there are
            name = schedule_name(name)
            return {"stages_per_rank": least_stages_per_rank(name), **given, "schedule": name}
        return given

    @model_validator(mode="before")  # before the one above
    @classmethod
    def _a_plan_of_its_own_decides(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("plan") != "auto":
            return given
        decided = [
            f"pipeline.{key}" for key in given if key in cls.model_fields.keys() - BESIDE_AUTO
        ]
        if decided:
            raise ValueError(
                f'pipeline.plan = "auto" decides {", ".join(decided)}; leave out one or the other '
                '(--set pipeline.plan="" takes the keys)'
            )
        return given

    @model_validator(mode="after")
    def _something_decides(self) -> Self:
        for key in ("num_stages", "num_microbatches"):
            if not self.plan and key not in self.model_fields_set:
                raise ValueError(f"the key pipeline.{key} is missing")
        if self.cluster and not self.plan:
            raise ValueError(
                f'pipeline.cluster = "{self.cluster}" is what pipeline.plan = "auto" plans for; '
                "set that too, or leave it out"
            )
        if self.measure and not self.plan:
            raise ValueError(
                'pipeline.measure = true is how pipeline.plan = "auto" plans; set that too, or '
                "leave it out (without a plan, layers are always measured)"
            )
        return self

    @property
    def planned_microbatches(self) -> int | None:
        """M, which plan = "auto" must keep; None if the planner chooses it."""
        return self.num_microbatches if "num_microbatches" in self.model_fields_set else None

    @model_validator(mode="after")
    def _layout_is_consistent(self) -> Self:
        # Replicas share the micro-batches.
        if self.num_microbatches % self.num_replicas:
            raise ValueError(
                f"pipeline.num_microbatches = {self.num_microbatches} must be a multiple of "
                f"pipeline.num_replicas = {self.num_replicas}, which share them"
            )
        # Only shards can divide operators.
        try:
            request = ShardingRequest.of(self.sharding)
        except ConfigError as error:
            raise ValueError(f"pipeline.{error}") from None
        if self.all_shards == 1 and request != ShardingRequest() and not request.gathers:
            raise ValueError(
                f'pipeline.sharding = "{request}" divides operators among the shards of a stage, '
                "and pipeline.num_shards is 1; set that to 2 or more, or leave sharding out"
            )
        # The schedule and the partition fit the stages.
        try:
            named_schedule(self.schedule, self.num_stages, self.stages_per_rank)
        except ConfigError as error:
            raise ValueError(
                f'pipeline.schedule = "{self.schedule}" with pipeline.num_stages = '
                f"{self.num_stages} and pipeline.stages_per_rank = {self.stages_per_rank}: {error}"
            ) from None
        if self.partition != "auto" and len(self.partition) != self.num_stages:
            raise ValueError(
                f"pipeline.partition = {list(self.partition)} has {len(self.partition)} stages, "
                f"pipeline.num_stages is {self.num_stages}; make them agree, "
                'or set partition to "auto"'
            )
        return self

    @property
    def given_device(self) -> str | None:
        """The device of the run; None if it is chosen when the run starts."""
        return None if self.device == "auto" else self.device

    @property
    def num_ranks(self) -> int:
        """Number of threads or processes along the pipeline."""
        return self.num_stages // self.stages_per_rank

    @property
    def all_shards(self) -> int:
        """T, the number of processes that share a stage of a replica, over all axes."""
        return prod(self.num_shards) if isinstance(self.num_shards, tuple) else self.num_shards

    @property
    def num_processes(self) -> int:
        """Number of processes of the run, unless it is one process with threads."""
        return self.num_ranks * self.num_replicas * self.all_shards

    @property
    def divides(self) -> ShardingRequest | None:
        """The sharding of operators and weights; None if each process has whole stages."""
        if self.all_shards * self.num_replicas == 1:
            return None
        request = ShardingRequest.of(self.sharding)
        if self.shard_optimizer and not request.gathers:
            request = replace(request, plan=f"{request.plan}+zero1")
        return request if self.all_shards > 1 or request.gathers else None
