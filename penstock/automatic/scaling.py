"""One model on more and more devices: the best plan for each number, and what a step costs.

profile ──► task ──► plan for 8 ──► plan for 16 ──► ...     copies of one task share its graphs and
                                                            the integer programs of its meshes
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from math import ceil
from typing import TYPE_CHECKING, Any

from penstock.costs.cluster import Cluster
from penstock.costs.profile import Profile
from penstock.costs.records import flops_of
from penstock.errors import ConfigError, PlanError
from penstock.planner.candidates import Constraints
from penstock.planner.make_plan import Choice, mesh_task, plan_profile
from penstock.planner.mesh_candidates import OnMeshes, sizes_of
from penstock.planner.mesh_task import FIRST_NUMBER
from penstock.trace.page import Page, Section, Table
from penstock.trace.page.charts import COLOURS, Trace, axis_of, layout_of, rounded
from penstock.trace.page.page import Figure
from penstock.trace.progress import say
from penstock.trace.units import count_text, number_text, percent_text, time_text

if TYPE_CHECKING:
    from .target import Target

_PROFILED_SIZES = (1, 16)
"""Samples of the micro-batches that are profiled."""
_HOUR_S = 3600.0
_STEPS = 1000
"""Steps whose device-hours are given, unless samples are."""


@dataclass(frozen=True, slots=True)
class Figures:
    """A step on a number of devices; `mfu` is None where FLOPs or their peak are not known."""

    step_s: float
    samples_per_s: float
    efficiency: float
    """Samples a second of a device, over those at the smallest count that fits."""
    mfu: float | None
    step_device_s: float
    """Seconds of a step, times the devices."""


@dataclass(frozen=True)
class AtCount:
    """The choice for a number of devices; None where nothing fits, and `missing` says why."""

    num_devices: int
    choice: Choice | None
    missing: str = ""

    @property
    def words(self) -> str:
        """The plan in words, or what is missing."""
        if self.choice is None:
            return self.missing
        best = self.choice.candidates[0]
        plan, stages = best.plan, best.stages_text.rpartition(" layers: ")[-1]
        replicas, recompute = plan.placement.num_replicas, best.recompute_text
        if not isinstance(best, OnMeshes):  # these texts stand under heads that say what they are
            stages, recompute = count_text(plan.num_stages, "stage"), f"recompute {recompute}"
        parts = [stages, *[count_text(replicas, "replica")] * (replicas > 1)]
        parts += [count_text(plan.num_microbatches, "micro-batch"), plan.schedule.name, recompute]
        return "; ".join(parts)


@dataclass(frozen=True)
class Scaling:
    """Plans of a model by number of devices, the fewest first, for one size of batch.

    `sample_flops` are those of a sample's forward and backward; `peak_flops_per_s` of a device, 0
    if it is not known.  `sample_tokens` are None for samples that are no sequences of numbers.
    """

    model: str
    cluster: str
    batch_size: int
    counts: tuple[AtCount, ...]
    sample_flops: float
    peak_flops_per_s: float
    sample_tokens: int | None = None

    @cached_property
    def figures(self) -> dict[int, Figures]:
        """The figures of each count for which something fits."""
        steps_s = {
            own.num_devices: own.choice.candidates[0].step_s for own in self.counts if own.choice
        }
        first = next((count * step_s for count, step_s in steps_s.items()), 0.0)
        found = {}
        for count, step_s in steps_s.items():
            rate = self.batch_size / step_s
            peak = count * self.peak_flops_per_s
            mfu = rate * self.sample_flops / peak if peak and self.sample_flops else None
            found[count] = Figures(step_s, rate, first / (step_s * count), mfu, step_s * count)
        return found

    def rows(self, num_samples: int | None = None) -> Iterator[tuple[str, ...]]:
        """Yield the heads of a table, and a row for each count.

        Device-hours are those of so many samples, or else of 1,000 steps.
        """
        unit = "tokens/s" if self.sample_tokens else "samples/s"
        yield "devices", "step", unit, "efficiency", "MFU", "device-hours", "plan"
        steps = _STEPS if num_samples is None else num_samples / self.batch_size
        for own in self.counts:
            found = self.figures.get(own.num_devices)
            cells = ["-"] * 5
            if found is not None:
                cells = [
                    time_text(found.step_s),
                    number_text(found.samples_per_s * (self.sample_tokens or 1)),
                    percent_text(found.efficiency),
                    "-" if found.mfu is None else percent_text(found.mfu),
                    number_text(found.step_device_s * steps / _HOUR_S),
                ]
            yield str(own.num_devices), *cells, own.words

    def to_json(self, num_samples: int | None = None) -> str:
        """Return the table as JSON: a list with an entry for each count, plans included."""
        steps = _STEPS if num_samples is None else num_samples / self.batch_size
        entries = []
        for own in self.counts:
            entry: dict[str, object] = {"devices": own.num_devices, "plan": None}
            found = self.figures.get(own.num_devices)
            if own.choice is None or found is None:
                entries.append(entry | {"missing": own.missing})
                continue
            entry |= asdict(found)
            if self.sample_tokens:
                entry["tokens_per_s"] = found.samples_per_s * self.sample_tokens
            entry["device_hours"] = found.step_device_s * steps / _HOUR_S
            entries.append(entry | {"plan": json.loads(own.choice.plan.to_json())})
        return json.dumps(entries, indent=1)


def scale(
    target: "Target",
    cluster: Cluster,
    counts: Sequence[int],
    batch_size: int | None = None,
    *,
    constraints: Constraints | None = None,
    sharding: str | None = "auto",
) -> Scaling:
    """Plan a target, whose layers are counted, for several numbers of a cluster's devices.

    Raises:
        ConfigError: the cluster has hosts of several kinds, or a count is no number of hosts.
    """
    # 1. Count the layers once, for all clusters.
    clusters = {count: part_of(cluster, count) for count in sorted(set(counts))}
    batch_size = batch_size or target.batch_size
    sizes = [size for size in _PROFILED_SIZES if size <= batch_size]
    (profile,) = target.profiles_for(cluster, sizes, measure=False)
    constraints = constraints or Constraints(batch_size=batch_size)
    if constraints.num_microbatches is None:
        constraints = replace(constraints, num_microbatches=target.fixed_microbatches)
    # 2. Plan for each count.
    found = scale_profile(
        profile,
        clusters,
        replace(constraints, batch_size=batch_size),
        target.shardings if sharding == "auto" else sharding,
    )
    # 3. Add what figures need.
    flops, peak = _flops(profile, cluster)
    shape: tuple[int, ...] = getattr(target.inputs, "shape", ())
    is_words = len(shape) == 2 and not target.inputs.is_floating_point()
    counted = flops, peak, int(shape[1]) if is_words else None
    return Scaling(target.name, cluster.name, batch_size, tuple(found), *counted)


def scale_profile(
    profile: Profile,
    clusters: dict[int, Cluster],
    asked: Constraints,
    sharding: str | Sequence[str] | None,
) -> Iterator[AtCount]:
    """Yield the choice for each cluster of equal hosts.

    All searches share graphs, and programs by micro-batches, sharding and shape.  They are quick:
    each begins with the number of micro-batches and the sizes of meshes that were best for the one
    before, the largest of which grows with the devices.  Plans of one device for each stage and
    replica are candidates only where operators are not divided.
    """
    task = mesh_task(profile, [*clusters.values()][-1], asked, sharding)
    number, fewest, share = FIRST_NUMBER, 1, 1.0
    for count, cluster in clusters.items():
        say(f"planning for {count_text(count, 'device')}")
        like = task and task.quick(number, (fewest, ceil(share * count)))
        try:
            choice = plan_profile(
                profile,
                cluster,
                asked.batch_size,
                constraints=asked,
                sharding=sharding,
                like=like,
            )
        except PlanError as error:
            yield AtCount(count, None, str(error))
            continue
        best = choice.candidates[0]
        if isinstance(best, OnMeshes):
            fewest, most = sizes_of([best])
            number, share = best.plan.num_microbatches, most / count
        yield AtCount(count, choice)


def part_of(cluster: Cluster, num_devices: int) -> Cluster:
    """Return a cluster of so many devices: the host of a cluster repeated, or a part of it.

    Raises:
        ConfigError: there are hosts of several kinds, or the number is of no whole hosts.
    """
    if len(cluster.hosts) != 1:
        raise ConfigError(
            f"the cluster {cluster.name} has {len(cluster.hosts)} kinds of hosts, and to plan for "
            "more devices one is repeated; describe a cluster of one kind"
        )
    (host,), name = cluster.hosts, cluster.name.rpartition(" x ")[-1]
    each = len(host.devices)
    if num_devices >= each and num_devices % each == 0:
        one = replace(cluster, name=name, hosts=(replace(host, count=1),))
        return one if num_devices == each else one.times(num_devices // each)
    if not 0 < num_devices < each:
        raise ConfigError(
            f"{num_devices} devices are no whole hosts of {name}, which have {each} each; give a "
            f"multiple of {each}, or fewer for a part of one host"
        )
    groups = (tuple(n for n in group if n < num_devices) for group in host.groups)
    part = replace(
        host,
        count=1,
        devices=host.devices[:num_devices],
        cards=min(host.cards, num_devices),
        groups=tuple(filter(None, groups)),
        busy_speed=host.busy_speed[:num_devices],
    )
    return replace(cluster, name=f"{num_devices} of {name}", hosts=(part,))


def _flops(profile: Profile, cluster: Cluster) -> tuple[float, float]:
    """Return the FLOPs of a sample, and the peak of a device for the dtype that has most."""
    size = profile.sizes[-1]
    layers = (size.layer(n).operators for n in range(len(profile.layers)))
    flops, dtype = flops_of(chain(*layers))
    return flops / size.microbatch_size, cluster.device_of(0).flops_per_s.get(dtype, 0.0)


_HEIGHT_PX = 380


def scale_page(scaling: Scaling, num_samples: int | None = None) -> Page:
    """Return the page; device-hours are those of so many samples, or else of 1,000 steps."""
    heads, *rows = scaling.rows(num_samples)
    what = "1,000 steps" if num_samples is None else count_text(num_samples, "sample")
    table = Table(heads, tuple(rows), f"Plans; device-hours of {what}")
    figures = (scale_figure(scaling),) if scaling.figures else ()
    batch = f"batches of {count_text(scaling.batch_size, 'sample')}, predicted"
    sections = (Section("Speed by devices", (*figures, table)),)
    return Page(f"{scaling.model} on {scaling.cluster}", batch, sections=sections)


def scale_figure(scaling: Scaling) -> Figure:
    """Draw samples or tokens a second by devices, both axes as logarithms, with the ideal line."""
    counts, found = [*scaling.figures], [*scaling.figures.values()]
    times = scaling.sample_tokens or 1
    unit = "tokens/s" if scaling.sample_tokens else "samples/s"
    rates = [own.samples_per_s * times for own in found]
    words = {own.num_devices: own.words for own in scaling.counts}
    ideal = [rates[0] * count / counts[0] for count in counts]
    planned: Trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "planned",
        "marker": {"size": 7},
        "line": {"color": COLOURS[0], "width": 2},
        "x": counts,
        "y": [*map(rounded, rates)],
        "customdata": [
            f"{own.efficiency:.0%} of ideal<br>{words[count]}"
            for count, own in zip(counts, found, strict=True)
        ],
        "hovertemplate": f"%{{x:,}} devices<br><b>%{{y:.4g}}</b> {unit}, %{{customdata}}"
        "<extra></extra>",
    }
    line: Trace = {
        "type": "scatter",
        "mode": "lines",
        "name": f"ideal: that of {count_text(counts[0], 'device')} times their number",
        "line": {"color": COLOURS[1], "width": 1.5, "dash": "dash"},
        "x": counts,
        "y": [*map(rounded, ideal)],
        "hoverinfo": "skip",
    }
    layout = layout_of(_HEIGHT_PX)
    ticks: dict[str, Any] = {"tickvals": counts, "ticktext": [f"{count:,}" for count in counts]}
    layout["xaxis"] = axis_of("devices", type="log", **ticks)
    layout["yaxis"] = axis_of(unit, type="log", exponentformat="SI", minorloglabels="none")
    label = f"{unit} at {', '.join(map(str, counts))} devices, with the ideal line"
    return Figure("scale", (planned, line), layout, label=label)
