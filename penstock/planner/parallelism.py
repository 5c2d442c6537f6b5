"""A layout of a model on devices by its usual words: tensor x data x pipeline x virtual stages."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise

from penstock.costs.cluster import Cluster
from penstock.costs.layer_facts import LayerFacts
from penstock.errors import ConfigError, check_count
from penstock.schedules import interleaved_1f1b, one_f_one_b
from penstock.schedules.family import Family
from penstock.schedules.names import family_of
from penstock.types import Recompute, RecomputeLayers, word_of

from .submeshes import MemoryPolicy

_MOST_ZERO = 3
_GROUP = re.compile(r"\(([^()]*)\)(?:\*(\d+))?|([A-Za-z])\*(\d+)")
"""A group or a letter of Megatron's layout, and how often it stands there."""


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """A layout of a training step on a cluster, by the words of Megatron-LM.

        penstock.Parallelism(tensor=4, pipeline=12, virtual=8, data=5, num_microbatches=48,
                             sequence=True, zero=1, recompute="layers")

    Rank r of the pipeline has devices r d c t to (r + 1) d c t - 1, d rows of c times t
    neighbours.  See Narayanan et al. 2021, sections 2 and 3.

    Args:
        tensor: t, the devices that share each operator (Shoeybi et al. 2019).
        data: d, rows of such devices, each with its own samples; None: as many as the cluster has.
        pipeline: p, the meshes that the stages are on.
        virtual: v, the stages of each mesh, if more than one interleaved: stage s on rank s mod p.
        expert: devices among which experts are divided, of those along `data`.
        context: c, devices of a row that have slices of its positions each: c t devices a row.
        microbatch_size: samples of a micro-batch in each row.
        num_microbatches: M; None: as many as make the batch.
        sequence: True cuts values between products along positions (Korthikanti et al. 2022).
        zero: 0; 1 divides the optimizer along `data`, 2 and 3 also weights (Rajbhandari et al.
            2020).
        recompute: "never", "stage" or "layers", as `Pipeline` takes it.
        recompute_num_layers: of each stage's repeated layers the first so many are recomputed, by
            "layers" (Megatron-LM's `--recompute-method block`); None: all.
        schedule: a family or its name; None: 1F1B, interleaved where `virtual` is more than 1.
        partition: the layers of each of the p v stages: their numbers, or Megatron's layout, as
            "Et*3|(tt|)*2L"; None: equal shares of the layer that the model repeats.

    Raises:
        ConfigError: a number is none that can be; two arguments do not go together.
    """

    tensor: int = 1
    data: int | None = None
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    context: int = 1
    microbatch_size: int = 1
    num_microbatches: int | None = None
    sequence: bool = False
    zero: int = 0
    recompute: Recompute | str = Recompute.NEVER
    recompute_num_layers: int | None = None
    schedule: Family | str | None = None
    partition: str | Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "virtual", "expert", "context", "microbatch_size"):
            check_count(name, getattr(self, name))
        for name in ("data", "num_microbatches", "recompute_num_layers"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if type(self.zero) is not int or not 0 <= self.zero <= _MOST_ZERO:
            raise ConfigError(f"zero={self.zero!r}; give 0, 1, 2 or 3, the stage of ZeRO")
        object.__setattr__(self, "recompute", word_of("recompute", self.recompute, Recompute))
        self._check_together()

    def _check_together(self) -> None:
        """Raise a ConfigError for arguments that do not go together."""
        if self.tensor > 1 and self.zero > 1:
            raise ConfigError(
                f"zero={self.zero} with tensor={self.tensor}: slices of weights are cut again for "
                "the optimizer only; give zero=1, or tensor=1"
            )
        if self.expert > 1 and self.tensor > 1:
            raise ConfigError(
                f"expert={self.expert} with tensor={self.tensor}: experts are divided along data "
                "or not at all; give tensor=1, or expert=1"
            )
        if self.context > 1 and (self.expert > 1 or self.zero > 1):
            other = f"expert={self.expert}" if self.expert > 1 else f"zero={self.zero}"
            raise ConfigError(
                f"context={self.context} with {other}: weights are whole along the axis of "
                "positions, but for the optimizer; give expert=1 and zero=0 or 1, or context=1"
            )
        if self.context > 1 and self.tensor > 1 and not self.sequence:
            raise ConfigError(
                f"context={self.context} with tensor={self.tensor} and sequence=False: values are "
                "cut along positions on both axes; give sequence=True"
            )
        if self.sequence and self.tensor == 1:
            raise ConfigError(
                "sequence=True with tensor=1: positions are cut among the devices that share an "
                "operator; give a larger tensor, or leave sequence out"
            )
        if self.virtual > 1 and self.pipeline == 1:
            raise ConfigError(
                f"virtual={self.virtual} with pipeline=1: the stages of one mesh do not "
                "interleave; give a larger pipeline, or virtual=1"
            )
        if self.recompute_num_layers is not None and self.recompute is not Recompute.LAYERS:
            assert isinstance(self.recompute, Recompute)
            raise ConfigError(
                f"recompute_num_layers={self.recompute_num_layers} with "
                f"recompute={self.recompute.value!r}: layers are recomputed one by one; give "
                'recompute="layers"'
            )

    def __str__(self) -> str:
        words = (
            f"{own.name}={getattr(own_value, 'value', own_value)}"
            for own in fields(self)
            if (own_value := getattr(self, own.name)) != own.default
        )
        return ", ".join(words) or "one device"

    @property
    def num_stages(self) -> int:
        """K."""
        return self.pipeline * self.virtual

    @property
    def family(self) -> Family:
        """The schedule's family."""
        if self.schedule is not None:
            return family_of(self.schedule, self.num_microbatches or 1)
        return interleaved_1f1b(self.virtual) if self.virtual > 1 else one_f_one_b

    def policy(self, layers: Sequence[LayerFacts]) -> MemoryPolicy:
        """Return the memory policy of all stages of a model's layers."""
        assert isinstance(self.recompute, Recompute)
        if self.recompute_num_layers is None:
            return MemoryPolicy(self.recompute)
        repeated, again = repeated_layers(layers), list[int]()
        for start, end in self.stages(layers):
            again += [n for n in repeated if start <= n < end][: self.recompute_num_layers]
        return MemoryPolicy(RecomputeLayers(tuple(again)))

    def rows(self, cluster: Cluster) -> int:
        """Return d, the rows of devices of a mesh.

        Raises:
            ConfigError: the layout does not divide the devices of the cluster.
        """
        count, of_row = len(cluster.places), self.tensor * self.context * self.pipeline
        words = f"tensor={self.tensor} x pipeline={self.pipeline}"
        words += f" x context={self.context}" if self.context > 1 else ""
        rows = self.data
        if rows is None and count % of_row:
            raise ConfigError(
                f"{words} = {of_row} devices, which do not divide the {count} of "
                f"{cluster.name}; {near_divisors(of_row, count)}, or give data="
            )
        if rows is not None and rows * of_row > count:
            raise ConfigError(
                f"{words} x data={rows} = {rows * of_row} devices, and {cluster.name} has "
                f"{count}; give smaller numbers, or a larger cluster"
            )
        rows = rows or count // of_row
        if rows % self.expert:
            raise ConfigError(
                f"expert={self.expert} does not divide the {rows} devices along data; "
                f"{near_divisors(self.expert, rows)}"
            )
        return rows

    def shape(self, rows: int) -> tuple[int, ...]:
        """Return the lengths of the axes of a mesh of so many rows."""
        axes = rows // self.expert, self.expert, self.context, self.tensor
        return tuple(n for n in axes if n > 1) or (1,)

    def sharding(self, rows: int) -> str:
        """Return the ready plan by which a mesh of so many rows divides operators."""
        plus = "+zero1" if self.zero == 1 else ""
        if self.expert > 1:
            return ("expert" if rows == self.expert else "data+expert") + plus
        if self.context > 1:
            axes = {"data": rows > 1, "context": True, "sequence": self.tensor > 1}
            return "+".join(name for name, is_there in axes.items() if is_there) + plus
        if self.tensor == 1:
            return "data" if self.zero == 0 or rows == 1 else f"zero{self.zero}"
        if rows == 1:
            return "sequence" if self.sequence else "megatron"
        return ("grid+sequence" if self.sequence else "grid") + plus

    def microbatches(self, rows: int, batch_size: int | None) -> int:
        """Return M for a batch of so many samples, over all rows.

        Raises:
            ConfigError: neither is known, or the batch does not divide.
        """
        each, number = self.microbatch_size * rows, self.num_microbatches
        if batch_size is None:
            if number is None:
                raise ConfigError(
                    "the number of micro-batches is not known; give num_microbatches= or "
                    "batch_size=, the samples of a step"
                )
            return number
        words = f"microbatch_size={self.microbatch_size} x data={rows}"
        if number is None:
            if batch_size % each:
                raise ConfigError(
                    f"{words} = {each} samples of a micro-batch, which do not divide "
                    f"batch_size={batch_size}; {near_divisors(each, batch_size)}"
                )
            return batch_size // each
        if number * each != batch_size:
            raise ConfigError(
                f"{words} x num_microbatches={number} = {number * each} samples, and "
                f"batch_size={batch_size}; leave one of the two out"
            )
        return number

    def stages(self, layers: Sequence[LayerFacts]) -> list[tuple[int, int]]:
        """Return the (start, end) of each stage in a model's layers.

        The layers beside the repeated ones go to the first stage and the last.

        Raises:
            ConfigError: the stages do not divide the layers.
        """
        repeated = repeated_layers(layers)
        if self.partition is None:
            each, rest = divmod(len(repeated), self.num_stages)
            if rest or not each:
                words = f"pipeline={self.pipeline}"
                words += f" x virtual={self.virtual}" if self.virtual > 1 else ""
                raise ConfigError(
                    f"{words} = {self.num_stages} stages, which do not divide the "
                    f"{len(repeated)} repeated layers of the model; "
                    f"{near_divisors(self.num_stages, len(repeated))}, or give partition="
                )
            starts = [repeated[n * each] for n in range(1, self.num_stages)]
            return [*pairwise([0, *starts, len(layers)])]
        if isinstance(self.partition, str):
            counts = _of_megatron(self.partition, repeated, len(layers))
        else:
            counts = [*self.partition]
        if len(counts) != self.num_stages or sum(counts) != len(layers) or min(counts) < 1:
            raise ConfigError(
                f"partition={self.partition!r} has {len(counts)} stages of {counts} layers; give "
                f"the {len(layers)} layers of the model to pipeline={self.pipeline} x "
                f"virtual={self.virtual} = {self.num_stages} stages, at least one to each"
            )
        return [*pairwise(accumulate(counts, initial=0))]


def repeated_layers(layers: Sequence[LayerFacts]) -> list[int]:
    """Return the numbers of the layers that a model repeats: of those alike that are several, the
    ones with the most parameters; all layers, if there are none.
    """
    alike = Counter((layer.kind, layer.shapes) for layer in layers)
    sizes = Counter[tuple[str, str]]()
    for layer in layers:
        if alike[own := (layer.kind, layer.shapes)] > 1:
            sizes[own] += layer.num_parameters
    most = max(sizes, key=sizes.__getitem__, default=None)
    found = [n for n, layer in enumerate(layers) if (layer.kind, layer.shapes) == most]
    return found or [*range(len(layers))]


def _of_megatron(text: str, repeated: Sequence[int], num_layers: int) -> list[int]:
    """Return the layers of each stage of Megatron's layout: E embedding, t layer, L loss, | next.

    Layers before the repeated ones count as the embedding, layers after them as the loss.
    """
    flat = text.replace(",", "").replace(" ", "")
    while (found := _GROUP.search(flat)) is not None:
        group, times, letter, of_letter = found.groups()
        whole = letter * int(of_letter) if letter else group * int(times or 1)
        flat = flat[: found.start()] + whole + flat[found.end() :]
    if unknown := sorted({*flat} - {*"EtL|"}):
        raise ConfigError(
            f"partition={text!r} has {unknown[0]!r}; Megatron's layout has E for the embedding, t "
            "for a layer, L for the loss, | between stages, and (...)*n or t*n for n times"
        )
    if (own := flat.count("t")) != len(repeated):
        raise ConfigError(
            f"partition={text!r} has {own} layers t, and the model repeats {len(repeated)}; give "
            "one t for each"
        )
    sizes = {"E": repeated[0], "t": 1, "L": num_layers - repeated[-1] - 1}
    return [sum(map(sizes.__getitem__, stage)) for stage in flat.split("|")]


def near_divisors(number: int, whole: int) -> str:
    """Name the divisors of a whole that are nearest to a number."""
    divisors = [n for n in range(1, whole + 1) if whole % n == 0]
    below = [n for n in divisors if n < number][-1:]
    above = [n for n in divisors if n > number][:1]
    return f"near divisors of {whole}: {', '.join(map(str, below + above))}"
