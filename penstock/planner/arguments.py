"""Resolve what a pipeline is asked for into a plan."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

from penstock.costs.layer_facts import LayerFacts
from penstock.errors import (
    ConfigError,
    ExecutionWarning,
    PartitionError,
    check_count,
    shown,
)
from penstock.schedules.family import Chosen, Family
from penstock.schedules.names import family_of
from penstock.schedules.one_f_one_b import one_f_one_b
from penstock.sharding.request import ShardingRequest
from penstock.trace.units import count_text
from penstock.types import (
    Recompute,
    RecomputeLayers,
    RecomputePolicy,
    Reduction,
    TiedGradients,
    Transport,
    word_of,
)

from .checks import check_partition, check_timeout
from .cuts import balance_spans
from .placement import Placement
from .plan import BalancedBy, Plan

DEFAULT_TIMEOUT_S = 600.0
MICROBATCHES_PER_RANK = 4
"""By default.  GPipe found the bubble negligible from M = 4 K on (section 2.3)."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Undecided:
    """What is left to decide when layers are measured.

    `balance`: the partition, and policies that meet a limit; `recompute`: the default policy.
    """

    balance: bool = False
    recompute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of a pipeline that decide how it runs; None was not given.

    `devices` names a device for each stage, or one for all.
    """

    num_stages: int | None = None
    partition: Sequence[int] | None = None
    num_microbatches: int | None = None
    schedule: Chosen | None = None
    recompute: RecomputePolicy | str | Sequence[RecomputePolicy | str] | None = None
    offload: bool | Sequence[bool] | None = None
    offload_folder: str | None = None
    memory_limit_bytes: int | Sequence[int] | None = None
    devices: Sequence[str] | str | None = None
    seed: int | None = None
    threads_per_stage: int | None = None
    transport: Transport | str | None = None
    timeout_s: float | None = None
    batch_norm_over_replicas: bool | None = None
    tied_gradients: TiedGradients | str | None = None
    gradient_dtype: str | None = None
    sharding: str | Mapping[str, Any] | None = None

    @property
    def undecided(self) -> "Undecided":
        """The decisions that are left to measured layers."""
        is_limited = self.memory_limit_bytes is not None
        return Undecided(
            balance=self.partition is None or is_limited,
            recompute=self.recompute is None and not is_limited and not self.offload,
        )

    def by_default(self, plan: Plan) -> str:
        """Say how the number of micro-batches was chosen; "" if it was given."""
        if self.num_microbatches is not None or plan.schedule.most_microbatches is not None:
            return ""
        ranks = count_text(plan.placement.num_places, "rank")
        return f"  micro-batches by default: {MICROBATCHES_PER_RANK} for each of {ranks}"

    def check_none_beside_plan(self) -> None:
        """Raise a ConfigError that names the given arguments, which a plan decides already."""
        names = [field.name for field in fields(self)]
        named = [f"{name}=" for name in names if getattr(self, name) is not None]
        if named:
            raise ConfigError(
                f"plan= decides {', '.join(named)} already; leave out one or the other, or change "
                "the plan: dataclasses.replace(plan, ...)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The resources of a pipeline.

    `placement` has the ranks at each place of a mesh; None without a mesh.  `transports` can carry
    values between these ranks, the usual one first.  `devices` are the accelerators of this
    process, `num_threads` is torch's number of intra-op threads.
    """

    num_threads: int
    num_cores: int
    devices: tuple[str, ...]
    placement: Placement | None = None
    transports: tuple[Transport, ...] = (Transport.THREADS, Transport.LOOPBACK)

    @property
    def num_places(self) -> int | None:
        """Places along the stages of the mesh; None without one."""
        return None if self.placement is None else self.placement.num_places

    def placed(self, places: Sequence[int], devices: Sequence[str]) -> Placement:
        """Return the placement of stages, each at its entry of `places`."""
        if self.placement is None:
            return Placement.of(places, devices=devices)
        return self.placement.spread(places, devices)


@dataclass(frozen=True, slots=True)
class Model:
    """The layers of a model, and the (start, end) of layers that stay on one stage."""

    layers: tuple[LayerFacts, ...]
    spans: tuple[tuple[int, int], ...]


def resolve_num_stages(arguments: Arguments, resources: Resources) -> int:
    """Return K: the one asked for, or the number that fills all ranks of the mesh.  A
    PartitionError says that neither is given, `partition` is no list, or the two disagree.
    """
    num_stages, partition = arguments.num_stages, arguments.partition
    if partition is not None:
        if not isinstance(partition, list | tuple):
            raise PartitionError(
                f"partition={shown(partition)}; give a list of whole numbers, the layers of each "
                "stage, such as [3, 2]"
            )
        if num_stages not in (None, len(partition)):
            raise PartitionError(
                f"num_stages={num_stages}, but partition={list(partition)} has {len(partition)} "
                "stages; give one of the two"
            )
        return len(partition)
    if num_stages is not None:
        return check_count("num_stages", num_stages)
    if resources.num_places is None:
        raise PartitionError("give num_stages=K, or partition=[layers per stage, ...]")
    return resources.num_places * _family(arguments, resources.num_places).stages_per_rank


def resolve(arguments: Arguments, num_stages: int, model: Model, resources: Resources) -> Plan:
    """Return the plan of these arguments.

    Without a `partition`, layers are balanced by parameter counts until they are measured.

    Raises:
        ConfigError: an argument cannot work, or does not fit the mesh.
        PartitionError: the layers cannot be cut as asked.
    """
    # 1. Check the partition, and find the rank and the device of each stage.
    family, partition = _family(arguments, num_stages), arguments.partition
    if partition is not None:
        check_partition(tuple(partition), len(model.layers))
    counts = [layer.num_parameters for layer in model.layers]
    places = resolve_places(family, num_stages, resources)
    devices = resolve_devices(arguments.devices, places, resources)
    # 2. Fill in defaults; `Plan` checks the values.
    plan = Plan(
        layers=model.layers,
        partition=tuple(partition or balance_spans([counts] * num_stages, model.spans)),
        schedule=family,
        num_microbatches=_or(arguments.num_microbatches, usual_microbatches(family, num_stages)),
        recompute=_of_each(
            "recompute",
            cast(Any, arguments.recompute),  # a plan reads words
            _usual_recompute(arguments),
            num_stages,
        ),
        offload=_of_each("offload", arguments.offload, False, num_stages),
        offload_folder=arguments.offload_folder,
        memory_limit_bytes=None
        if arguments.memory_limit_bytes is None
        else _of_each("memory_limit_bytes", arguments.memory_limit_bytes, 0, 1 + max(places)),
        placement=resources.placed(places, devices),
        sharding=cast(str | ShardingRequest | None, arguments.sharding),  # a plan reads mappings
        tied_gradients=cast(
            TiedGradients, _or(arguments.tied_gradients, TiedGradients.PER_MICROBATCH)
        ),
        gradient_dtype=arguments.gradient_dtype,
        batch_norm_over_replicas=_or(arguments.batch_norm_over_replicas, False),
        seed=_or(arguments.seed, 0),
        threads_per_stage=resolve_threads(arguments.threads_per_stage, places, resources),
        transport=resolve_transport(arguments.transport, resources),
        timeout_s=check_timeout(_or(arguments.timeout_s, DEFAULT_TIMEOUT_S)),
        balanced_by=BalancedBy.PARAMETERS if partition is None else BalancedBy.HAND,
    )
    # 3. Only a plan can tell whether each named layer is on the stage that names it.
    check_named_layers(plan, is_cut=partition is not None)
    return plan


def check_named_layers(plan: Plan, *, is_cut: bool = True) -> None:
    """Raise a ConfigError if a layer is, or might be, recomputed on no stage: named for another
    than its own.  Before the model `is_cut`, any stage may get a layer, so all must name it.
    """
    home_of = [stage for stage, size in enumerate(plan.partition) for _ in range(size)]
    choices = enumerate(plan.recompute)
    named_layers = [(stage, x.layers) for stage, x in choices if isinstance(x, RecomputeLayers)]
    named = [(stage, int(n)) for stage, layers in named_layers for n in layers]
    # The stage that gets a layer must recompute it: whole, or by the same name.
    for stage, n in named:
        for home in (home_of[n],) if is_cut else range(plan.num_stages):
            if plan.recompute[home] in (Recompute.STAGE, Recompute.LAYERS) or (home, n) in named:
                continue
            where = f"is on stage {home}; name it in recompute[{home}]"
            if not is_cut:
                where = f"may come to be on stage {home}; give partition= too"
            raise ConfigError(
                f"recompute[{stage}] names layer {n}, {plan.layers[n].name!r}, which {where}, or "
                "give one Recompute.layers(...) for all stages"
            )


def _of_each(
    name: str, values: _T | Sequence[_T] | None, default: _T, count: int
) -> tuple[_T, ...]:
    """Return one entry for each stage or rank, from one each or one for all."""
    if not isinstance(values, list | tuple):
        return (default if values is None else cast(_T, values),) * count
    if len(values) != count:
        owners = "ranks" if name == "memory_limit_bytes" else "stages"
        entries = "1 entry" if len(values) == 1 else f"{len(values)} entries"
        raise ConfigError(
            f"{name}= has {entries}, and the pipeline {count} {owners}; give one for each, or one "
            "for all"
        )
    return tuple(values)


def _usual_recompute(arguments: Arguments) -> Recompute:
    """Return the default recompute policy; with a memory limit `balanced` chooses it later."""
    if arguments.memory_limit_bytes is None:
        return Recompute.STAGE
    if arguments.recompute is not None:
        raise ConfigError(
            "memory_limit_bytes= decides what is recomputed, and recompute= is given too; leave "
            "one of them out"
        )
    return Recompute.NEVER


def _family(arguments: Arguments, num_stages: int) -> Family:
    most = MICROBATCHES_PER_RANK * num_stages
    num_microbatches = check_count("num_microbatches", _or(arguments.num_microbatches, most))
    schedule = one_f_one_b if arguments.schedule is None else arguments.schedule
    return family_of(schedule, num_microbatches)


def usual_microbatches(family: Family, num_stages: int) -> int:
    """Return the default M: 4 for each rank (GPipe, section 2.3), or that of the one schedule."""
    return family.most_microbatches or MICROBATCHES_PER_RANK * (1 + max(family.ranks(num_stages)))


def resolve_places(family: Family, num_stages: int, resources: Resources) -> tuple[int, ...]:
    """Return the rank of each stage, within a replica; a ConfigError if the schedule is for
    another number of ranks than the mesh has, or leaves one of them without a stage.
    """
    places, of_mesh = family.ranks(num_stages), resources.num_places
    num_ranks = 1 + max(places)
    if of_mesh not in (None, num_ranks):
        raise ConfigError(
            f"the mesh has {of_mesh} ranks a pipeline, the schedule runs {num_stages} stages on "
            f"{num_ranks}; leave out num_stages and partition, give init_mesh "
            f"num_stages={num_ranks}, or run several stages on a rank "
            "(schedule=schedules.interleaved_1f1b(stages_per_rank=...))"
        )
    idle = sorted(set(range(num_ranks)) - set(places))
    if of_mesh is not None and idle:
        raise ConfigError(
            f"the schedule gives rank {', '.join(map(str, idle))} of the mesh no stage; give each "
            "rank one, or start fewer processes"
        )
    return places


def resolve_devices(
    devices: Sequence[str] | str | None, places: Sequence[int], resources: Resources
) -> tuple[str, ...]:
    """Return the device of each stage; the default is one accelerator per rank, or the CPU.
    Another number of them than of stages is a ConfigError.
    """
    if devices is None:
        local = resources.devices or ("cpu",)
        return tuple(local[place % len(local)] for place in places)
    if isinstance(devices, str):
        return (devices,) * len(places)
    if len(devices) != len(places):
        raise ConfigError(
            f"{len(devices)} devices for {len(places)} stages; give one per stage (a device may "
            "be named several times), or one for all"
        )
    return tuple(devices)


def resolve_threads(asked: int | None, places: Sequence[int], resources: Resources) -> int:
    """Return the intra-op threads of a stage, at most one per core; below 1 is a ConfigError.

    The default divides torch's threads (OMP_NUM_THREADS) among the ranks of this process.
    """
    if asked is None:
        between = resources.transports[0].is_between_processes
        in_process = 1 if between else 1 + max(places)
        return max(1, resources.num_threads // in_process)
    cores = resources.num_cores
    if check_count("threads_per_stage", asked) > cores:
        warnings.warn(
            f"threads_per_stage={asked}, and this process may use {cores} cores: each stage "
            f"computes with {cores} threads. Some kernels round differently for another count; "
            f"to compare with another machine, give both the same number, at most {cores}",
            ExecutionWarning,
            stacklevel=3,
        )
    return min(asked, cores)


def resolve_transport(transport: Transport | str | None, resources: Resources) -> Transport:
    """Return the transport: the one asked for if it works here, else the usual one."""
    usual, able = resources.transports[0], resources.transports
    asked = usual if transport is None else word_of("transport", transport, Transport)
    return asked if asked in able else usual


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def check_loss(loss: Any) -> None:
    """Raise a ConfigError for a loss that is no function."""
    if isinstance(loss, type):
        name = loss.__name__
        raise ConfigError(f"loss={name} is a class; give {name}(), which computes the loss")
    if loss is not None and not callable(loss):
        raise ConfigError(
            f"loss={shown(loss)}; give a function (output, target) -> scalar tensor, such as "
            "torch.nn.functional.cross_entropy"
        )


def reduction_of(reduction: Any) -> Any:
    """Return the reduction that a user's argument names, or the function that it is."""
    if callable(reduction) and reduction is not Reduction:
        return reduction
    more = ", or a function target -> weight of its micro-batch"
    return word_of("reduction", reduction, Reduction, more)
