"""A plan as a page: what was chosen and why, a table of its stages; and of a plan on sub-meshes a
picture of layers by stages, and how each weight is cut.

devices   layers ──►
0         ███████ 12 MiB
1                ██████████████
2                ██████████████       a block: a layer on its stage's mesh, coloured by its cuts
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate, cycle, pairwise, repeat

from penstock.costs.counting.graph import Graph
from penstock.sharding.layouts import I, Layout, R, S, State, layout_text
from penstock.sharding.plan import LayerSharding, Sharding
from penstock.trace.looks import KEPT, WAIT
from penstock.trace.page import Page, Section, Step, Table, Text, with_step
from penstock.trace.page.charts import COLOURS, Trace, axis_of, layout_of, rounded, spread
from penstock.trace.page.page import Figure
from penstock.trace.units import bytes_text, count_text

from .make_plan import Choice
from .plan import Plan
from .plan_sharding import sharding_of
from .stage_rows import (
    devices_text,
    mesh_text,
    segments_of,
    span_text,
    stages_text,
)

_MOST_TICKS = 40
_LEAST_ROW_PX, _LEAST_PX, _MOST_PX = 44, 150, 900
_WORTH_A_WORD = 0.2
"""Share of a layer's weights from which on its colour says how they are cut."""
_ONE_DEVICE, _NO_WEIGHTS = "on one device", "without weights"


@dataclass(frozen=True, slots=True)
class DrawnWeight:
    """A weight of a layer, its bytes, and its layout at rest along the axes of the mesh."""

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    layout: Layout

    @property
    def words(self) -> tuple[str, ...]:
        """The layout along each mesh axis, in words."""
        return tuple(_words(state, len(self.shape)) for state in self.layout)


@dataclass(frozen=True, slots=True)
class DrawnLayer:
    """A layer on the mesh of its stage."""

    stage: int
    name: str
    weights: tuple[DrawnWeight, ...]
    forward_bytes: int
    backward_bytes: int

    @property
    def cuts(self) -> str:
        """The layouts of most of its weights, in words for each mesh axis."""
        if not self.weights:
            return _NO_WEIGHTS
        if not self.weights[0].layout:
            return _ONE_DEVICE
        total, axes = sum(own.num_bytes for own in self.weights), []
        for axis in range(len(self.weights[0].layout)):
            found: dict[str, int] = defaultdict(int)
            for own in self.weights:
                found[own.words[axis]] += own.num_bytes
            worth = (words for words, own in found.items() if own >= _WORTH_A_WORD * total)
            axes.append(" and ".join(sorted(worth)))
        return _over_axes(axes)


def _over_axes(words: Sequence[str]) -> str:
    return words[0] if len(set(words)) == 1 else " x ".join(words)


def _words(state: State, num_dims: int) -> str:
    if not isinstance(state, S):
        return {I: "whole", R: "gradients summed"}[state]
    if num_dims == _DIMS_OF_EXPERTS and state.dim == 0:
        return "by experts"
    return _OF_DIMS.get(state.dim, f"along dimension {state.dim}")


_OF_DIMS = {0: "by rows", 1: "by columns"}
_DIMS_OF_EXPERTS = 3
"""A matrix for each expert."""


def plan_page(choice: Choice) -> Page:
    """Return the page of a plan that was chosen for a cluster."""
    plan, best, cluster = choice.plan, choice.candidates[0], choice.cluster
    limits: tuple[int, ...] = ()
    if plan.predicted_stages is None:
        places = plan.placement.cluster_places or range(plan.placement.num_ranks)
        limits = tuple(
            cluster.device_of(places[rank]).memory_bytes for rank in plan.placement.peers_in(0)
        )
    step = Step(predicted=best.timeline, optimizer_s=best.update_s, memory_limits_bytes=limits)
    page = with_step(Page(f"Plan for {cluster.name}", plan_subtitle(plan)), step)
    heads, *rows = choice.rows
    title = f"The fastest of {len(choice.candidates):,}"
    rest = [
        Section("Candidates", (Table(heads, tuple(rows), title),)),
        plan_section(plan),
        Section("Cluster", (Text(str(cluster), "code"),)),
    ]
    if plan.predicted_stages is None:
        return replace(page, sections=(*page.sections, *rest))
    assert choice.task is not None, "its stages are on meshes"
    graph, names = choice.task.graph_of(plan.num_microbatches), choice.task.names
    sharding = None if plan.sharding is None else sharding_of(plan, graph, names)
    layers = drawn_layers(plan, graph, names, sharding)
    first = Section("Layers by stages", (layers_figure(plan, layers),))
    weights = Section("Weights", (weights_table(layers), Text(_LEGEND, "note")))
    return replace(page, sections=(first, *page.sections, weights, *rest), notes=(_NOTE,))


def plan_section(plan: Plan) -> Section:
    """Write a plan as a section of a page."""
    heads, *rows = (tuple(row) for row in plan.rows)
    lines = (line for each in plan.reasons for line in each.splitlines())
    return Section("Plan", (*map(Text, lines), Table(heads, tuple(rows))))


def plan_subtitle(plan: Plan) -> str:
    """Say in a line what a plan runs."""
    replicas, stages = plan.placement.num_replicas, count_text(plan.num_stages, "stage")
    layers, microbatches = len(plan.layers), count_text(plan.num_microbatches, "micro-batch")
    many = f", {replicas} replicas" if replicas > 1 else ""
    if plan.placement.is_regular and plan.placement.most_shards > 1:
        many += f", {plan.placement.most_shards} shards"
    return f"{count_text(layers, 'layer')} in {stages}{many}, {microbatches}, {plan.schedule}"


_NOTE = "A rank of the timeline stands for the mesh of a stage: its devices do the same at once."
_LEGEND = (
    "Layouts along the axes of the mesh: I is whole, R is whole and its gradients are summed once "
    "a step, S(d) is in slices of dimension d. What is sent, by each device for a micro-batch, is "
    "that of all layers of the row."
)


def drawn_layers(
    plan: Plan, graph: Graph, names: Sequence[str], sharding: Sharding | None
) -> list[DrawnLayer]:
    """Say how each layer's weights are divided; `graph` is that of a micro-batch."""
    takes: dict[int, dict[int, None]] = defaultdict(dict)
    for call in graph.calls:
        takes[call.layer] |= dict.fromkeys(call.takes)
    found = []
    for n, stage in enumerate(_stages_of(plan)):
        axes = plan.placement.shard_axes_of(stage)
        whole: Layout = (I,) * len(axes) if axes != (1,) else ()
        own = LayerSharding(names[n], (), {}) if sharding is None else sharding.layers[n]
        weights = []
        for spec in map(graph.tensors.__getitem__, takes[n]):
            if spec.name and spec.wants_gradient:
                name = spec.name.removeprefix(f"{names[n]}.")
                layout = own.weights.get(name, whole) if whole else whole
                weights.append(DrawnWeight(name, spec.shape, spec.num_bytes, layout))
        sent = own.forward_bytes, own.backward_bytes
        found.append(DrawnLayer(stage, names[n], tuple(weights), *sent))
    return found


def _stages_of(plan: Plan) -> Iterator[int]:
    """Yield the stage of each layer."""
    for stage, count in enumerate(plan.partition):
        yield from repeat(stage, count)


def layers_figure(plan: Plan, layers: Sequence[DrawnLayer]) -> Figure:
    """Draw layers, in order, by stages: as high as the devices of a mesh are many."""
    rows = [*segments_of(plan)]
    sizes = [len(plan.placement.ranks[own[0]][0]) for own in rows]
    tops = list(accumulate(sizes, initial=0))
    row_of = {stage: row for row, own in enumerate(rows) for stage in own}
    px = min(max(_LEAST_ROW_PX / min(sizes), _LEAST_PX / tops[-1]), _MOST_PX / tops[-1])
    gap = 2 / px
    kinds: dict[str, list[int]] = defaultdict(list)
    for n, layer in enumerate(layers):
        kinds[layer.cuts].append(n)
    data: list[Trace] = [
        {
            "type": "bar",
            "name": cuts,
            "x": own,
            "y": [rounded(sizes[row_of[layers[n].stage]] - 2 * gap) for n in own],
            "base": [rounded(tops[row_of[layers[n].stage]] + gap) for n in own],
            "width": 1,
            "marker": {"color": colour, "line": {"width": 1}},
            "customdata": [_hover(plan, layers[n]) for n in own],
            "hovertemplate": "%{customdata}<extra></extra>",
        }
        for (cuts, own), colour in zip(kinds.items(), _colours(kinds), strict=True)
    ]
    count = len(layers)
    layout = layout_of(tops[-1] * px + 170, top=58, bottom=100, showlegend=True)
    ticks = spread(count, _MOST_TICKS)
    layout["xaxis"] = axis_of("layers, in order", range=[-0.5, count - 0.5], showgrid=False)
    layout["xaxis"] |= {"tickvals": ticks, "ticktext": [escape(layers[n].name) for n in ticks]}
    layout["xaxis"] |= {"automargin": True, "tickangle": -45}
    heads = (f"stage {stages_text(own)} on {mesh_text(plan, own[0])}" for own in rows)
    where = (escape(devices_text(plan, own[0])) for own in rows)
    layout["yaxis"] = {
        "range": [tops[-1], 0],
        "tickvals": [(a + b) / 2 for a, b in pairwise(tops)],
        "ticktext": [f"<b>{head}</b><br>{own}" for head, own in zip(heads, where, strict=True)],
        "fixedrange": True,
        "automargin": True,
        "showgrid": False,
    }
    layout["shapes"] = [_ground(a + gap, b - gap, count) for a, b in pairwise(tops)]
    layout["annotations"] = list(_links(plan, tops, count))
    return Figure("layers", tuple(data), layout)


def _colours(kinds: Iterable[str]) -> Iterator[str]:
    """Yield a colour for each way to cut: the same on every page for those along one axis."""
    others = cycle(COLOURS[5:])
    for cuts in kinds:
        yield _USUAL.get(cuts) or next(others)


_USUAL = {
    "gradients summed": COLOURS[0],
    "by rows": COLOURS[3],
    "by columns": COLOURS[4],
    "by experts": COLOURS[1],
    "whole": COLOURS[2],
    _ONE_DEVICE: KEPT.fill,
    _NO_WEIGHTS: WAIT.fill,
}


def _ground(top: float, low: float, count: int) -> Trace:
    """Return the row behind a stage's layers."""
    place = {"x0": -0.5, "x1": count - 0.5, "y0": rounded(top), "y1": rounded(low)}
    return {"name": "ground", "type": "rect", "layer": "below", "line": {"width": 0}, **place}


def _links(plan: Plan, tops: Sequence[int], count: int) -> Iterator[Trace]:
    """Yield what each stage sends to the next, at the corner where their blocks meet: where its
    row or that of the next one is free, on the side that has room.
    """
    ends = [*accumulate(plan.partition)]
    for row, stages in enumerate([*segments_of(plan)][:-1]):
        if plan.predicted_stages is None:
            return
        text = f"{bytes_text(plan.predicted_stages[stages[-1]].sent_bytes)} a micro-batch"
        end = ends[stages[-1]]
        is_left = end > count / 2
        yield {
            "text": f"{text} ↴" if is_left else f"↳ {text}",
            "x": end - 0.5,
            "y": tops[row + 1],
            "xanchor": "right" if is_left else "left",
            "yanchor": "top" if is_left else "bottom",
            "showarrow": False,
        }


def _hover(plan: Plan, layer: DrawnLayer) -> str:
    """Say what a block is: where it is, and the layout of each weight."""
    lines = [f"<b>{escape(layer.name)}</b>, stage {layer.stage} on {mesh_text(plan, layer.stage)}"]
    for layout, own in _by_layout(layer).items():
        names = ", ".join(weight.name for weight in own)
        short = names if len(names) <= _MOST_LETTERS else f"{names[:_MOST_LETTERS]}..."
        lines.append(escape(f"{layout_text(layout)}  {short}".strip()))
    sent = layer.forward_bytes + layer.backward_bytes
    return "<br>".join([*lines, *([f"{bytes_text(sent)} sent by each device"] if sent else [])])


_MOST_LETTERS = 90


def _by_layout(layer: DrawnLayer) -> dict[Layout, list[DrawnWeight]]:
    found: dict[Layout, list[DrawnWeight]] = defaultdict(list)
    for own in layer.weights:
        found[own.layout].append(own)
    return found


def weights_table(layers: Sequence[DrawnLayer]) -> Table:
    """Write the layouts of weights: a row for each layout of the layers of a stage whose weights
    are alike, and what these layers send in the first of them.
    """
    alike: dict[object, list[DrawnLayer]] = defaultdict(list)
    for layer in layers:
        alike[layer.stage, layer.weights].append(layer)
    rows = []
    for own in alike.values():
        first = own[0]
        name = first.name if len(own) == 1 else f"{len(own)}: {span_text([x.name for x in own])}"
        both = zip(*((layer.forward_bytes, layer.backward_bytes) for layer in own), strict=True)
        sent = [bytes_text(total) if total else "-" for total in map(sum, both)]
        head = str(first.stage), name
        for layout, weights in _by_layout(first).items():
            words = dict.fromkeys(_over_axes(weight.words or (_ONE_DEVICE,)) for weight in weights)
            rows.append(
                (
                    *head,
                    layout_text(layout) or "-",
                    " or ".join(words),
                    _names(weights, is_all=len(weights) == len(first.weights)),
                    bytes_text(sum(weight.num_bytes for weight in weights)),
                    *sent,
                )
            )
            head, sent = ("", ""), ["", ""]
    return Table(_HEADS, tuple(rows))


_HEADS = (
    *("stage", "layers", "layout", "in words", "weights", "bytes, whole"),
    *("sent forward", "backward"),
)


def _names(weights: Sequence[DrawnWeight], *, is_all: bool) -> str:
    """Name weights with their shapes; of many only those that are no vectors."""
    if is_all and len(weights) > 1:
        return f"all {len(weights)}"
    large = [own for own in weights if len(own.shape) > 1 or len(weights) == 1]
    names = [f"{own.name} {'x'.join(map(str, own.shape))}" for own in large]
    rest = len(weights) - len(large)
    return ", ".join([*names, *([count_text(rest, "vector")] if rest else [])])
