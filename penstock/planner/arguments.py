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
    check_kind,
    shown,
)
from penstock.schedules.family import Build, Family
from penstock.schedules.gpipe import gpipe
from penstock.schedules.ir import Schedule
from penstock.schedules.names import family_of
from penstock.sharding.request import ShardingRequest
from penstock.types import (
    CheckBatches,
    Recompute,
    RecomputeLayers,
    RecomputePolicy,
    Reduction,
    TiedGradients,
    Transport,
)

from .checks import check_partition, check_timeout
from .cuts import balance_spans
from .placement import Placement
from .plan import BalancedBy, Plan

DEFAULT_TIMEOUT_S = 600.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of a pipeline that decide how it runs; None is what was not given.

    `devices` are the names of one for each stage, or of one for all.
    """

    num_stages: int | None = None
    partition: Sequence[int] | None = None
    num_microbatches: int | None = None
    schedule: Build | Schedule | None = None
    recompute: RecomputePolicy | Sequence[RecomputePolicy] | None = None
    offload: bool | Sequence[bool] | None = None
    offload_folder: str | None = None
    memory_limit_bytes: int | Sequence[int] | None = None
    devices: Sequence[str] | str | None = None
    seed: int | None = None
    threads_per_stage: int | None = None
    transport: Transport | None = None
    timeout_s: float | None = None
    batch_norm_over_replicas: bool | None = None
    tied_gradients: TiedGradients | None = None
    sharding: str | Mapping[str, Any] | None = None

    @property
    def are_measured(self) -> bool:
        """True if layers must be measured: to balance them, or to meet a limit of memory."""
        return self.partition is None or self.memory_limit_bytes is not None

    def check_none_beside_plan(self) -> None:
        """Refuse arguments that a plan decides already.

        Raises:
            ConfigError: names those that were given.
        """
        names = [field.name for field in fields(self)]
        given = [f"{name}=" for name in names if getattr(self, name) is not None]
        if given:
            raise ConfigError(
                f"plan= decides {', '.join(given)} already; leave out one or the other, or change "
                "the plan: dataclasses.replace(plan, ...)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The resources of a pipeline.

    `placement` says where each place of a mesh is; None without a mesh.  `transports`
    are those that can carry values here, the usual one first: between processes each rank is one,
    else a thread of this one.  `devices` are the accelerators of this process, `num_threads` those
    that torch uses here.
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
        """Return where stages are, each at one of these places."""
        if self.placement is None:
            return Placement.of(places, devices=devices)
        return self.placement.spread(places, devices)


@dataclass(frozen=True, slots=True)
class Model:
    """The layers of a model, and the (start, end) of layers that stay on one stage."""

    layers: tuple[LayerFacts, ...]
    spans: tuple[tuple[int, int], ...]


def resolve_num_stages(arguments: Arguments, resources: Resources) -> int:
    """Decide K: as asked, else as many as the schedule has on the ranks of a mesh.

    Raises:
        PartitionError: neither is given, `partition` is no list, or the two disagree.
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
    return resources.num_places * _family(arguments).stages_per_rank


def resolve(arguments: Arguments, num_stages: int, model: Model, resources: Resources) -> Plan:
    """Make the plan that the arguments ask for; layers are balanced by parameter counts until they
    are measured.

    Raises:
        ConfigError: an argument cannot work, or does not fit the mesh.
        PartitionError: the layers cannot be cut as asked.
    """
    family, partition = _family(arguments), arguments.partition
    if partition is not None:
        check_partition(tuple(partition), len(model.layers))
    counts = [layer.num_parameters for layer in model.layers]
    places = resolve_places(family, num_stages, resources)
    devices = resolve_devices(arguments.devices, places, resources)
    plan = Plan(
        layers=model.layers,
        partition=tuple(partition or balance_spans([counts] * num_stages, model.spans)),
        schedule=family,
        num_microbatches=_or(arguments.num_microbatches, 1),
        recompute=_of_each(
            "recompute", arguments.recompute, _usual_recompute(arguments), num_stages
        ),
        offload=_of_each("offload", arguments.offload, False, num_stages),
        offload_folder=arguments.offload_folder,
        memory_limit_bytes=None
        if arguments.memory_limit_bytes is None
        else _of_each("memory_limit_bytes", arguments.memory_limit_bytes, 0, 1 + max(places)),
        placement=resources.placed(places, devices),
        sharding=cast(str | ShardingRequest | None, arguments.sharding),  # a plan reads mappings
        tied_gradients=_or(arguments.tied_gradients, TiedGradients.PER_MICROBATCH),
        batch_norm_over_replicas=_or(arguments.batch_norm_over_replicas, False),
        seed=_or(arguments.seed, 0),
        threads_per_stage=resolve_threads(arguments.threads_per_stage, places, resources),
        transport=resolve_transport(arguments.transport, resources),
        timeout_s=check_timeout(_or(arguments.timeout_s, DEFAULT_TIMEOUT_S)),
        balanced_by=BalancedBy.PARAMETERS if partition is None else BalancedBy.HAND,
    )
    check_named_layers(plan, is_cut=partition is not None)
    return plan


def check_named_layers(plan: Plan, *, is_cut: bool = True) -> None:
    """Refuse layers to recompute that were named for a stage which has not got them; before the
    model `is_cut`, for one that may not get them.

    Raises:
        ConfigError: a layer is, or might be, recomputed on no stage.
    """
    home_of = [stage for stage, size in enumerate(plan.partition) for _ in range(size)]
    choices = enumerate(plan.recompute)
    some = [(stage, x.layers) for stage, x in choices if isinstance(x, RecomputeLayers)]
    named = [(stage, int(n)) for stage, layers in some for n in layers]
    for stage, n in named:
        for home in (home_of[n],) if is_cut else range(plan.num_stages):
            if plan.recompute[home] is Recompute.STAGE or (home, n) in named:
                continue
            where = f"is on stage {home}; name it in recompute[{home}]"
            if not is_cut:
                where = f"may come to be on stage {home}; give partition= too"
            raise ConfigError(
                f"recompute[{stage}] names layer {n}, {plan.layers[n].name!r}, which {where}, or "
                "give one Recompute.layers(...) for all stages"
            )


def _of_each(
    name: str, given: _T | Sequence[_T] | None, default: _T, count: int
) -> tuple[_T, ...]:
    """Return one entry for each stage, or rank: those given, or the one for all.

    Raises:
        ConfigError: there are more or fewer.
    """
    if not isinstance(given, list | tuple):
        return (default if given is None else cast(_T, given),) * count
    if len(given) != count:
        what = "ranks" if name == "memory_limit_bytes" else "stages"
        entries = "1 entry" if len(given) == 1 else f"{len(given)} entries"
        raise ConfigError(
            f"{name}= has {entries}, and the pipeline {count} {what}; give one for each, or one "
            "for all"
        )
    return tuple(given)


def _usual_recompute(arguments: Arguments) -> Recompute:
    """Return what is recomputed where nothing else is said: under a limit, what it asks for.

    Raises:
        ConfigError: both are given.
    """
    if arguments.memory_limit_bytes is None:
        return Recompute.STAGE
    if arguments.recompute is not None:
        raise ConfigError(
            "memory_limit_bytes= decides what is recomputed, and recompute= is given too; leave "
            "one of them out"
        )
    return Recompute.NEVER


def _family(arguments: Arguments) -> Family:
    num_microbatches = check_count("num_microbatches", _or(arguments.num_microbatches, 1))
    schedule = gpipe if arguments.schedule is None else arguments.schedule
    return family_of(schedule, num_microbatches)


def resolve_places(family: Family, num_stages: int, resources: Resources) -> tuple[int, ...]:
    """Return the rank of each stage, within a replica.

    Raises:
        ConfigError: the schedule is for another number of ranks than the mesh has, or leaves one
            of them without a stage.
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
    """Return the device of each stage: as asked, else the accelerators rank by rank, else the CPU.

    Raises:
        ConfigError: there are not as many as stages.
    """
    if devices is None:
        own = resources.devices or ("cpu",)
        return tuple(own[place % len(own)] for place in places)
    if isinstance(devices, str):
        return (devices,) * len(places)
    if len(devices) != len(places):
        raise ConfigError(
            f"{len(devices)} devices for {len(places)} stages; give one per stage (a device may "
            "be named several times), or one for all"
        )
    return tuple(devices)


def resolve_threads(asked: int | None, places: Sequence[int], resources: Resources) -> int:
    """Return the intra-op threads of a stage: as asked, at most the cores; else torch's for this
    process (OMP_NUM_THREADS, torch.set_num_threads) divided among its ranks.

    Raises:
        ConfigError: `threads_per_stage` is no whole number of at least 1.
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


def resolve_transport(asked: Transport | None, resources: Resources) -> Transport:
    """Return what carries values here: as asked, if that can, else the first that can."""
    able = resources.transports
    if asked is None or (isinstance(asked, Transport) and asked not in able):
        return able[0]
    return asked  # a plan refuses what is no transport


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def check_wanted(loss: Any, reduction: Any, check_batches: Any) -> None:
    """Refuse what a pipeline cannot be told about its losses and batches.

    Raises:
        ConfigError: says which, and what to give.
    """
    _check_loss(loss)
    _check_reduction(reduction)
    choices = "one of " + ", ".join(map(str, CheckBatches))
    check_kind("check_batches", check_batches, CheckBatches, choices)


def _check_loss(loss: Any) -> None:
    """Refuse a loss that cannot be called with outputs and targets; None is none.

    Raises:
        ConfigError: it is a class, or nothing that can be called.
    """
    if isinstance(loss, type):
        name = loss.__name__
        raise ConfigError(f"loss={name} is a class; give {name}(), which computes the loss")
    if loss is not None and not callable(loss):
        raise ConfigError(
            f"loss={shown(loss)}; give a function (output, target) -> scalar tensor, such as "
            "torch.nn.functional.cross_entropy"
        )


def _check_reduction(reduction: Any) -> None:
    """Refuse what does not say how a loss reduces.

    Raises:
        ConfigError: it is neither a Reduction nor a function.
    """
    is_choice = isinstance(reduction, Reduction)
    if not is_choice and (reduction is Reduction or not callable(reduction)):
        raise ConfigError(
            f"reduction={shown(reduction)}; give {', '.join(map(str, Reduction))}, or a function "
            "target -> weight of its micro-batch"
        )
