"""The plan of a pipeline: everything that decides how it runs, as one value."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from penstock.costs.cluster import Cluster
from penstock.costs.layer_facts import LayerFacts, check_factors, first_difference
from penstock.errors import ConfigError, PlanError, UnreadableError, check_count, check_kind
from penstock.plain_values import from_json, path_of, to_json
from penstock.schedules.family import Family
from penstock.schedules.names import SCHEDULE_NAMES, family_of
from penstock.sharding.request import ShardingRequest
from penstock.trace.units import columns, count_text, time_text
from penstock.types import Recompute, RecomputeLayers, TiedGradients, Transport, word_of

from .checks import check_bytes, check_partition, check_predicted, check_timeout, check_whole
from .placement import Placement
from .stage_rows import PredictedStage, stage_rows
from .unsplit import Unsplit, check_unsplit, divides_backwards, unsplit_lines


class BalancedBy(Enum):
    """How the layers of each stage were chosen."""

    HAND = "hand"
    """Given as `partition`."""
    PARAMETERS = "parameters"
    """By the number of parameters of each layer."""
    TIME = "time"
    """By the measured time of each layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that decides how a pipeline runs a model; nothing else does.

    `layers` are those of the model; `partition` has the number of layers of each stage, and
    `placement` its ranks.  `recompute` and `offload` have an entry for each stage.  `offload`
    moves activations to the host's memory, or on a CPU to files in `offload_folder` (None: the
    folder of temporary files).
    `memory_limit_bytes` limits the activations of each rank of a replica.  It decides recompute
    and offload; `predicted_peak_bytes` are the activations that result. `sharding` divides the
    operators of a stage among its ranks: the name of a ready plan, or a mapping
    (docs/sharding.md).  `predicted_s` are the seconds of a micro-batch's forward and backward on
    each stage, if layers were measured; `predicted_stages` say more about stages on meshes.
    `unsplit` are the layers whose backwards cannot be divided: found by measuring, and in the
    first step of a schedule that divides backwards.  `gradient_dtype`: None for each weight's own.
    A planner notes the `batch_size` over all replicas, the predicted seconds of a step with the
    optimizer, `why` it chose the plan, and the `cluster` by whose links operators were divided
    (None: a host of eight A100s).  `layer_factors` are measured over estimated seconds, by layer.

    `print(plan)` is a table; `save` and `load` write and read JSON; `dataclasses.replace` makes
    another plan of it.

    Raises:
        PlanError, PartitionError, ConfigError: parts of it do not fit together.
    """

    layers: tuple[LayerFacts, ...]
    partition: tuple[int, ...]
    schedule: Family
    num_microbatches: int
    recompute: tuple[Recompute | RecomputeLayers, ...]
    placement: Placement
    offload: tuple[bool, ...] = ()
    offload_folder: str | None = None
    sharding: str | ShardingRequest | None = None
    tied_gradients: TiedGradients = TiedGradients.PER_MICROBATCH
    gradient_dtype: str | None = None
    batch_norm_over_replicas: bool = False
    seed: int = 0
    threads_per_stage: int = 1
    transport: Transport = Transport.THREADS
    timeout_s: float = 600.0
    balanced_by: BalancedBy = BalancedBy.HAND
    predicted_s: tuple[float, ...] | None = None
    memory_limit_bytes: tuple[int, ...] | None = None
    predicted_peak_bytes: tuple[int, ...] | None = None
    unsplit: tuple[Unsplit, ...] | None = None
    batch_size: int | None = None
    predicted_step_s: float | None = None
    why: tuple[str, ...] = ()
    cluster: Cluster | None = None
    predicted_stages: tuple[PredictedStage, ...] | None = None
    layer_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        names = ("layers", "partition", "recompute", "offload", "predicted_s", "unsplit", "why")
        more = ("predicted_stages", "layer_factors")
        # 1. Bring fields to the form in which JSON gives them back, and layers to numbers.
        for name in (*names, *more, *_OF_RANKS):
            entries = getattr(self, name)
            object.__setattr__(self, name, None if entries is None else tuple(entries))
        object.__setattr__(self, "schedule", family_of(self.schedule, self.num_microbatches))
        self._check_sharding()
        check_partition(self.partition, len(self.layers))
        object.__setattr__(self, "offload", self.offload or (False,) * self.num_stages)
        object.__setattr__(self, "recompute", tuple(map(self._numbered, self.recompute)))
        # 2. Check each field on its own.
        for moves in self.offload:
            check_kind("offload", moves, bool, "True or False")
        tied = word_of("tied_gradients", self.tied_gradients, TiedGradients)
        object.__setattr__(self, "tied_gradients", tied)
        object.__setattr__(self, "transport", word_of("transport", self.transport, Transport))
        check_count("num_microbatches", self.num_microbatches)
        check_count("threads_per_stage", self.threads_per_stage)
        check_timeout(self.timeout_s)
        object.__setattr__(self, "seed", check_whole("seed", self.seed))
        # 3. Check that all fields fit together: stages, ranks, layers, and the schedule.
        for name, of_stages in (
            ("recompute", self.recompute),
            ("offload", self.offload),
            ("placement.ranks", self.placement.ranks),
            ("predicted_s", self.predicted_s),
            ("predicted_stages", self.predicted_stages),
        ):
            if of_stages is not None and len(of_stages) != self.num_stages:
                raise PlanError(
                    f"a plan of {self.num_stages} stages has {name} for {len(of_stages)}; give "
                    "one entry for each stage"
                )
        check_predicted(self.predicted_s, self.predicted_step_s, self.batch_size)
        check_bytes(self.placement.num_places, {n: getattr(self, n) for n in _OF_RANKS})
        check_factors(self.layer_factors, len(self.layers))
        check_unsplit(self.unsplit or (), len(self.layers))
        ranks = self.schedule.ranks(self.num_stages)
        if self.placement.places != ranks:
            raise PlanError(
                f"the schedule {self.schedule.name} runs the stages on ranks {list(ranks)}, and "
                f"the placement has them on {list(self.placement.places)}; change one of the two"
            )

    def devices_of(self, stage: int) -> tuple[int, ...]:
        """Return the cluster's devices that share a stage of the first replica; () without one."""
        if self.cluster is None:
            return ()
        places = self.placement.cluster_places
        ranks = self.placement.ranks[stage][0]
        return ranks if places is None else tuple(places[rank] for rank in ranks)

    def _check_sharding(self) -> None:
        """Raise a PlanError for shards without `sharding`, and for `sharding` without shards."""
        if self.sharding is not None and not isinstance(self.sharding, str):
            object.__setattr__(self, "sharding", ShardingRequest.of(self.sharding))
        num_shards = self.placement.most_shards
        num_replicas = max(map(len, self.placement.meshes))
        may_divide = num_shards * num_replicas > 1
        if (num_shards > 1 and self.sharding is None) or (self.sharding and not may_divide):
            raise PlanError(
                f"sharding={self.sharding!r}, and a stage has {count_text(num_shards, 'rank')} in "
                "each replica; give a name of a ready plan with init_mesh(num_shards=), or neither"
            )

    @property
    def num_stages(self) -> int:
        """K."""
        return len(self.partition)

    def _numbered(self, policy: Any) -> Any:
        """Return a policy as a value, with layers by number, in order."""
        if not isinstance(policy, RecomputeLayers):
            more = ', or Recompute.layers("name of a layer", ...)'
            return word_of("recompute", policy, Recompute, more)
        numbers = {layer.name: n for n, layer in enumerate(self.layers)}
        layers = [numbers.get(x, x) if isinstance(x, str) else x for x in policy.layers]
        for name, number in zip(policy.layers, layers, strict=True):
            if type(number) is not int or not 0 <= number < len(self.layers):
                raise ConfigError(
                    f"recompute=Recompute.{policy.name}: the model has no layer {name!r}; give "
                    f"names, such as {self.layers[0].name!r}, or numbers from 0 to "
                    f"{len(self.layers) - 1}"
                )
        return RecomputeLayers(tuple(sorted(set(layers))))

    def recomputed(self, stage: int) -> tuple[int, ...]:
        """The layers of a stage that run twice, by number."""
        start = sum(self.partition[:stage])
        stage_layers, policy = range(start, start + self.partition[stage]), self.recompute[stage]
        if isinstance(policy, RecomputeLayers):
            return tuple(n for n in stage_layers if n in policy.layers)
        return () if policy is Recompute.NEVER else tuple(stage_layers)

    def dropped_layers(self, stage: int) -> frozenset[int]:
        """The layers of a stage that are recomputed one by one, not with the whole stage."""
        is_whole = self.recompute[stage] is Recompute.STAGE
        return frozenset(() if is_whole else self.recomputed(stage))

    @property
    def recomputing(self) -> frozenset[int]:
        """The stages that recompute any layer."""
        return frozenset(stage for stage in range(self.num_stages) if self.recomputed(stage))

    @property
    def by_layers(self) -> frozenset[int]:
        """The stages that recompute layer by layer."""
        return frozenset(stage for stage in self.recomputing if self.dropped_layers(stage))

    @property
    def offloading(self) -> frozenset[int]:
        """The stages that offload their activations."""
        return frozenset(stage for stage, moves in enumerate(self.offload) if moves)

    def check_model(self, layers: Sequence[LayerFacts]) -> None:
        """Raise a PlanError that names the first layer in which a model differs."""
        differs = first_difference(self.layers, layers, "plan")
        if differs is not None:
            raise PlanError(f"the plan is of another model: {differs}. {_REMEDY}")

    def check_ranks(self, num_processes: int, num_places: int | None = None) -> None:
        """Raise a PlanError if the plan is for another number of processes, or of mesh places.

        One process runs all ranks as threads, if there is one replica and no shards.
        """
        placement, planned = self.placement, self.placement.num_places
        num_ranks, num_replicas = placement.num_ranks, placement.num_replicas
        is_alone = num_processes == num_replicas == placement.most_shards == 1
        if num_places in (None, planned) and (is_alone or num_processes == num_ranks):
            return
        if is_alone:
            raise PlanError(
                f"the plan is for {count_text(planned, 'rank')}, and the mesh has {num_places}; "
                f"make it with init_mesh(num_stages={planned}), or leave mesh= out"
            )
        mesh = f", with {count_text(num_places, 'rank')} for each replica" if num_places else ""
        raise PlanError(
            f"the plan is for {count_text(num_ranks, 'rank')}, {num_ranks // num_replicas} for "
            f"each replica, and this job has {count_text(num_processes, 'process')}{mesh}; start "
            f"{num_ranks} (torchrun --nproc-per-node), or make a plan for what is there"
        )

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, as JSON.

        Raises:
            PlanError: the file cannot be written, or the schedule is a function of your own.
        """
        text, file = self.to_json(), path_of(path, "Plan", PlanError)
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot write the plan {path}: {error.strerror}") from None

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan that `save` wrote.

        Raises:
            PlanError: the file cannot be read, or does not hold a plan; `path` is the text of one.
        """
        file = path_of(path, "Plan", PlanError)
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot read the plan {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise PlanError(f"{path} is no plan: it is no text in UTF-8 ({error})") from None
        try:
            return cls.from_json(text)
        except ConfigError as error:
            raise PlanError(f"{path} is no plan that can run: {error}") from None

    def to_json(self) -> str:
        """Write the plan as JSON; `from_json` reads it back.

        Raises:
            PlanError: the schedule is a function of your own.
        """
        try:
            return to_json(self)
        except UnreadableError as error:
            raise PlanError(f"{error}; keep the plan as a value") from None

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read a plan that `to_json` wrote.

        Raises:
            PlanError: the text is cut off, a key is unknown or missing, a value is of another
                type, or values do not fit together.
        """
        try:
            plan: Plan = from_json(cls, text)
        except UnreadableError as error:
            raise PlanError(str(error)) from None
        return plan

    @property
    def choices(self) -> str:
        """The schedule, the recompute and offload policies and the gradients, in words."""
        kinds = dict.fromkeys(kind.name for kind in self.recompute)
        words = f"schedule={self.schedule}, recompute={'/'.join(kinds)}"
        if self.offloading:
            stages = ", ".join(map(str, sorted(self.offloading)))
            words += f", offload of stage {stages}"
        is_usual = self.tied_gradients is TiedGradients.PER_MICROBATCH
        words += "" if is_usual else f", tied_gradients={self.tied_gradients.name}"
        return words + (f", gradient_dtype={x}" if (x := self.gradient_dtype) else "")

    @property
    def balance(self) -> str:
        """How the partition was found, in words."""
        if self.balanced_by is BalancedBy.HAND:
            return "as given"
        if self.predicted_s is None:
            return "balanced by parameter counts"
        slowest_s, mean_s = max(self.predicted_s), sum(self.predicted_s) / self.num_stages
        how = "measured" if self.predicted_step_s is None else "predicted"
        return (
            f"balanced by {how} time: slowest stage {time_text(slowest_s)} a micro-batch, "
            f"{slowest_s / mean_s:.2f} times the mean"
        )

    def __str__(self) -> str:
        return "\n".join((*self.reasons, *columns(self.rows)))

    @property
    def reasons(self) -> tuple[str, ...]:
        """The lines above the table: the choices, and the reasons for them."""
        placement = self.placement
        return (
            f"{count_text(len(self.layers), 'layer')} as {count_text(self.num_stages, 'stage')} x "
            f"{count_text(placement.num_replicas, 'replica')} on "
            f"{count_text(placement.num_ranks, 'rank')}, "
            f"{count_text(self.num_microbatches, 'micro-batch')}",
            f"{self.choices}, seed {self.seed}, "
            f"{count_text(self.threads_per_stage, 'thread')} per stage",
            f"layers {self.balance}",
            *([] if self.sharding is None else [f"sharding={self.sharding}"]),
            *self._memory(),
            *self._splitting(),
            *self.why,
        )

    @property
    def rows(self) -> list[Sequence[str]]:
        """The table of stages: heads, then a row for each."""
        return list(stage_rows(self))

    def _memory(self) -> Iterator[str]:
        if self.memory_limit_bytes is not None:
            limits = ", ".join(f"{limit:,}" for limit in self.memory_limit_bytes)
            peaks = self.predicted_peak_bytes
            predicted = "?" if peaks is None else ", ".join(f"{peak:,}" for peak in peaks)
            yield f"bytes kept by rank: {predicted} predicted, at most {limits}"

    def _splitting(self) -> Iterator[str]:
        """Yield the backwards that run whole although the schedule divides them."""
        is_named, count = self.schedule.name in SCHEDULE_NAMES, self.num_microbatches
        few = min(count, _ENOUGH_TO_TELL) if is_named else count
        if divides_backwards(self.schedule(self.num_stages, few)):
            yield from unsplit_lines(self.unsplit, self.layers, self.partition)


_OF_RANKS = ("memory_limit_bytes", "predicted_peak_bytes")
_ENOUGH_TO_TELL = 8
"""Micro-batches that suffice to see whether a family divides backwards."""
_REMEDY = "Make a plan of this model, or leave plan= out"
