"""The figures of a given layout's predicted step; several layouts, and their page."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from penstock.costs.cluster import Cluster
from penstock.costs.counting.graph import Graph
from penstock.costs.profile import Profile
from penstock.costs.records import Part, flops_of
from penstock.errors import PenstockError
from penstock.schedules.ir import Recompute
from penstock.sharding.costs import Costs
from penstock.sharding.plan import PlannedCall
from penstock.sharding.routed import num_operators, routed_calls
from penstock.sharding.rules import ALIKE
from penstock.trace.page import Fact, Page, Section, Step, Table, Text, with_step
from penstock.trace.page.charts import memory_chart
from penstock.trace.page.lane_chart import lane_chart
from penstock.trace.timeline import MemoryKind
from penstock.trace.units import bytes_text, count_text, number_text, percent_text, time_text

from .mesh_candidates import OnMeshes
from .mesh_plans import on_layout
from .parallelism import Parallelism
from .stage_program import Matrix

MEMORY_SHARE = 0.9
"""The usual share of a device's memory that a step may use: allocators need the rest."""
HEADS = (
    *("name", "step", "per device", "MFU", "bubble", "collectives", "between stages"),
    *("memory", "fits", "devices", "batch", "why not"),
)
NOTE = (
    "Collectives are what messages inside a mesh add to its work, sums of gradients among them; "
    "behind a host that issues more slowly they add nothing. Messages between "
    "stages count both ways, though other work may hide them. Both are seconds of a step on the "
    "device that has most."
)
_MOST_DRAWN = 4
"""Layouts whose steps are drawn."""
_NOTE = "A rank of the timeline stands for all devices of a mesh; steps end before the optimizer."
_FACTS = ("MFU", "collectives", "between stages", "memory")
_WORDS = {"int64", "int32"}
"""The dtypes of inputs that are tokens."""


class _Work(NamedTuple):
    """Seconds of the operators of layers [first, end) for a micro-batch, on a device of a mesh,
    or of their issue by its host where that is slower: arrays by [first, end].
    """

    seconds: Matrix
    forward_s: Matrix


@dataclass(frozen=True)
class LayoutFigures:
    """The figures of a layout by its name; without a candidate, the `reason` why it cannot be."""

    name: str
    layout: Parallelism
    candidate: OnMeshes | None = None
    reason: str = ""
    memory_share: float = MEMORY_SHARE

    @property
    def own(self) -> OnMeshes:
        """The candidate of a layout that can be."""
        assert self.candidate is not None, self.reason
        return self.candidate

    @property
    def step_s(self) -> float:
        """Seconds of a step with the optimizer; infinite for a layout that cannot be."""
        return float("inf") if self.candidate is None else float(self.candidate.step_s)

    @cached_property
    def devices(self) -> list[int]:
        """The numbers of the devices that have a stage."""
        return sorted({*chain(*self.own.answer.devices)})

    @property
    def rate(self) -> float:
        """Tokens, or else samples, that a device processes in a second."""
        each = _tokens_of_sample(self._graph) or 1
        return self.own.task.batch_size * each / self.step_s / len(self.devices)

    @property
    def unit(self) -> str:
        """The unit of `rate`: "tokens" where the model's input is sequences of whole numbers."""
        return "tokens" if _tokens_of_sample(self._graph) else "samples"

    @property
    def mfu(self) -> float | None:
        """FLOPs of forwards and backwards without recomputes, by those that the devices could do
        in a step at the peak of the dtype with most FLOPs; None if no device states that peak.
        """
        flops, dtype = flops_of(chain(*(call.operators for call in self._graph.calls)))
        device_of = self.own.task.cluster.device_of
        peaks = [device_of(n).flops_per_s.get(dtype, 0.0) for n in self.devices]
        if not all(peaks) or not flops:
            return None
        return flops * self._number / (self.step_s * sum(peaks))

    @cached_property
    def bubble(self) -> float:
        """Share of the devices' time in which they have nothing to do, before the optimizer."""
        return float(self.own.timeline.bubble)

    @cached_property
    def collectives_s(self) -> float:
        """Seconds that messages inside a mesh add to the work of a step, those of recomputes and
        sums of gradients too, on the device that has most.
        """
        again = Counter(
            span.instruction.stage
            for span in self.own.timeline.spans
            if isinstance(span.instruction, Recompute)
        )
        if len(self.own.answer.devices[0]) == 1:
            return 0.0
        work_s, seconds = dict[str, _Work](), defaultdict[object, float](float)
        for n, (stage, part) in enumerate(
            zip(self.own.answer.stages, self.own.stages, strict=True)
        ):
            devices = stage.submesh.devices
            kind = self.own.task.cluster.places[devices[0]].kind
            if kind not in work_s:
                work_s[kind] = _work_s(self.own, devices)
            # the last layer has the code after it
            end = -1 if stage.end == len(self.own.task.names) else stage.end
            both_s, work_forward_s = (float(table[stage.start, end]) for table in work_s[kind])
            forward_s = max(0.0, part.forward_s - work_forward_s)
            back_s = max(0.0, part.backward_s - (both_s - work_forward_s))
            part_again = part.recompute_s / part.forward_s if part.forward_s else 0.0
            each_s = self._number * (forward_s + back_s) + again[n] * part_again * forward_s
            seconds[devices] += each_s + part.once_s
        return max(seconds.values())

    @property
    def between_stages_s(self) -> float:
        """Seconds of a step's messages to next stages and back, on the device that has most."""
        seconds = defaultdict[object, float](float)
        for devices, own in zip(self.own.answer.devices, self.own.stages, strict=True):
            seconds[devices] += own.handover_s
        return max(seconds.values()) * self._number

    @property
    def peak_bytes(self) -> int:
        """The most bytes of a device."""
        return max(self._peaks)

    @cached_property
    def _peaks(self) -> Sequence[int]:
        return self.own.timeline.peak_bytes_of_ranks()

    @cached_property
    def peak_by_kind(self) -> Mapping[MemoryKind, int]:
        """The peak of each kind on the fullest device."""
        rank = self._peaks.index(self.peak_bytes)
        by_kind = self.own.timeline.peak_bytes_by_kind()
        return {kind: own[rank] for kind, own in by_kind.items()}

    @property
    def memory_bytes(self) -> int:
        """The memory of the smallest device."""
        device_of = self.own.task.cluster.device_of
        return min(device_of(n).memory_bytes for n in self.devices)

    @property
    def limit_bytes(self) -> int:
        """The share of that memory that a step may use."""
        return int(self.memory_share * self.memory_bytes)

    @property
    def fits(self) -> bool:
        """Whether the fullest device stays within the limit."""
        return self.peak_bytes <= self.limit_bytes

    @property
    def cells(self) -> dict[str, str]:
        """The figures as text, by the heads of a table."""
        if self.candidate is None:
            return dict.fromkeys(HEADS, "-") | {"name": self.name, "why not": self.reason}
        lacks = self.peak_bytes - self.limit_bytes
        kinds = (f"{kind.value} {bytes_text(x)}" for kind, x in self.peak_by_kind.items() if x)
        by_kind = ", ".join(kinds)
        return {
            "name": self.name,
            "step": time_text(self.step_s),
            "per device": f"{number_text(self.rate)} {self.unit}/s",
            "MFU": "-" if self.mfu is None else percent_text(self.mfu),
            "bubble": percent_text(self.bubble),
            "collectives": time_text(self.collectives_s),
            "between stages": time_text(self.between_stages_s),
            "memory": bytes_text(self.peak_bytes) + (f" ({by_kind})" if by_kind else ""),
            "fits": "yes" if self.fits else f"no, lacks {bytes_text(lacks)}",
            "devices": f"{len(self.devices):,}",
            "batch": f"{self.own.task.batch_size:,}",
            "why not": "",
        }

    @property
    def plain(self) -> dict[str, Any]:
        """The figures as numbers, for JSON: seconds, bytes and shares."""
        words = {"name": self.name, "layout": str(self.layout)}
        if self.candidate is None:
            return {**words, "reason": self.reason}
        return {
            **words,
            "step_s": self.step_s,
            "optimizer_s": float(self.own.update_s),
            "batch_size": self.own.task.batch_size,
            "num_microbatches": self._number,
            "num_devices": len(self.devices),
            f"{self.unit}_per_s_per_device": self.rate,
            "mfu": self.mfu,
            "bubble": self.bubble,
            "collectives_s": self.collectives_s,
            "between_stages_s": self.between_stages_s,
            "peak_bytes": self.peak_bytes,
            "peak_bytes_by_kind": {kind.value: x for kind, x in self.peak_by_kind.items()},
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
        }

    @property
    def _number(self) -> int:
        """M."""
        return self.own.prices.num_microbatches

    @property
    def _graph(self) -> Graph:
        """The graph of a micro-batch, over all rows of a mesh."""
        return self.own.task.graph_of(self._number)


def compared(
    layouts: Mapping[str, Parallelism],
    profile: Profile,
    cluster: Cluster,
    batch_size: int | None = None,
    usual_batch_size: int | None = None,
    memory_share: float = MEMORY_SHARE,
) -> list[LayoutFigures]:
    """Return the figures of layouts by name, the fastest first, and at the end those that cannot
    be.  `batch_size` are the samples of a step, `usual_batch_size` those of layouts that do not
    say their number of micro-batches if it is None.
    """
    found = []
    for name, layout in layouts.items():
        own = LayoutFigures(name, layout, memory_share=memory_share)
        samples = batch_size or (None if layout.num_microbatches else usual_batch_size)
        try:
            found.append(replace(own, candidate=on_layout(layout, profile, cluster, samples)))
        except PenstockError as error:
            found.append(replace(own, reason=str(error)))
    return sorted(found, key=lambda own: own.step_s)


def rows_of(figures: Sequence[LayoutFigures]) -> list[tuple[str, ...]]:
    """Return the table of layouts: heads, then a row for each, without columns of no text."""
    every = [own.cells for own in figures]
    heads = [head for head in HEADS if any(cells[head] for cells in every)]
    return [tuple(heads), *(tuple(cells[head] for head in heads) for cells in every)]


def best_in_words(figures: Sequence[LayoutFigures]) -> str:
    """Say which layout is the fastest of those that fit, and what sets it apart."""
    can = [own for own in figures if own.candidate is not None]
    fitting = [own for own in can if own.fits]
    if not can:
        return "No layout can be; the table says why."
    if not fitting:
        return (
            f"No layout fits the memory; {can[0].name} would be the fastest, with "
            f"{bytes_text(can[0].peak_bytes)} on its fullest device. Give recompute, zero, "
            "smaller micro-batches, or more devices."
        )
    best, words = fitting[0], ""
    if len(fitting) > 1:
        share = 1 - best.step_s / fitting[1].step_s
        words = f", {percent_text(share)} less than {fitting[1].name}" if share else ""
    number = count_text(len(fitting), "layout")
    text = f"{best.name} is the fastest of {number} that fit: {time_text(best.step_s)} a step"
    text += f"{words} ({best.layout})."
    if len({own.own.task.batch_size for own in can}) > 1:
        text += " The batches differ, so compare what a device does in a second."
    return text


def _tokens_of_sample(graph: Graph) -> int:
    """Return the positions of a sample of whole numbers; 0 for a model of other inputs."""
    inputs = [graph.tensors[value.number] for value in graph.values if value.maker < 0]
    shapes = [x.shape for x in inputs if x.dtype in _WORDS and len(x.shape) == len("BT")]
    return shapes[0][1] if shapes else 0


def _work_s(candidate: OnMeshes, devices: tuple[int, ...]) -> _Work:
    """Return the seconds of layers' operators on a device of a mesh, the loss as a last layer.

    All meshes of a layout have one shape, and divide operators by one ready plan.
    """
    prices, graph = candidate.prices, candidate.prices.ended
    shape = candidate.stages[0].option.shape
    plans = next(iter(prices.shared.values())).within(None)
    costs = Costs(shape, prices.cluster, devices=devices, factors=prices.factors)
    each, layers = [(0.0, 0.0)], []
    for n, plan in enumerate(plans):
        calls = routed_calls(graph, n)
        if not plan.calls:  # it runs whole, with calls that have nothing to divide
            calls = [call for call in graph.of_layer(n) if not call.is_between]
        planned = plan.calls or (PlannedCall("", (ALIKE,) * len(costs.mesh)),) * len(calls)
        forward_s = both_s = 0.0
        for call, own in zip(calls, planned, strict=True):
            forward = tuple(x for x in call.operators if x.part is Part.FORWARD)
            both_s += costs.call_s(graph, call, own)
            forward_s += costs.call_s(graph, replace(call, operators=forward), own)
        each.append((both_s, forward_s))
        layers.append(num_operators(calls))
    sums = np.cumsum(each, axis=0)
    seconds, forwards_s = np.moveaxis(sums - sums[:-1, None], -1, 0)
    return _Work(*costs.issued(layers, seconds, forwards_s))


def layout_page(own: LayoutFigures) -> Page:
    """Return the page of one layout that can be."""
    cluster, cells = own.own.task.cluster, own.cells
    limits = (own.limit_bytes,) * len(set(own.own.answer.devices))
    step = Step(
        predicted=own.own.timeline, optimizer_s=own.own.update_s, memory_limits_bytes=limits
    )
    page = with_step(Page(f"{own.name} on {cluster.name}", str(own.layout)), step)
    facts = [Fact(f"{own.unit}/s a device", cells["per device"].split(" ")[0])]
    facts += [Fact(name, cells[name]) for name in _FACTS]
    heads, *rows = (tuple(row) for row in own.own.plan.rows)
    stages = Section("Stages", (Table(heads, tuple(rows)),))
    sections = *page.sections, stages, _cluster(cluster)
    return replace(page, facts=(*page.facts, *facts), sections=sections, notes=(_NOTE, NOTE))


def layouts_page(name: str, cluster: Cluster, figures: Sequence[LayoutFigures]) -> Page:
    """Return the page of the layouts of a model by its name, in the order given."""
    heads, *rows = rows_of(figures)
    told = tuple((own.name, str(own.layout)) for own in figures)
    sections = (
        Section("Layouts", (Text(best_in_words(figures)), Table(heads, tuple(rows)))),
        *_steps(figures),
        Section("Words of the layouts", (Table(("name", "words"), told),)),
        _cluster(cluster),
    )
    title = f"{name} on {cluster.name}"
    return Page(title, count_text(len(figures), "layout"), sections=sections, notes=(NOTE,))


def _steps(figures: Sequence[LayoutFigures]) -> Iterator[Section]:
    """Yield the timelines of the fastest layouts, and their memory."""
    can = [own for own in figures if own.candidate is not None]
    if not can:
        return
    drawn = {escape(own.name): own.own.timeline for own in can[:_MOST_DRAWN]}
    bubbles = {escape(own.name): own.bubble for own in can}
    left = f" The {len(drawn)} fastest are drawn." if len(drawn) < len(can) else ""
    yield Section("Timelines", (lane_chart(drawn, bubbles), Text(_NOTE + left, "note")))
    charts = [
        replace(
            memory_chart(own.own.timeline, (own.limit_bytes,) * len(own.devices), f"memory-{n}"),
            title=own.name,  # escaped by the page
        )
        for n, own in enumerate(can[:_MOST_DRAWN])
    ]
    yield Section("Memory", tuple(charts))


def _cluster(cluster: Cluster) -> Section:
    return Section("Cluster", (Text(str(cluster), "code"),))
