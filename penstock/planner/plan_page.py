"""The page of a plan: the choice, the table of stages; for stages on sub-meshes also a chart of
the layers, and the layout of each weight.

devices   layers ──►
0         ███████ 12 MiB
1                ██████████████
2                ██████████████       a block: a layer on its stage's mesh, coloured by its cuts
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate, cycle, pairwise

from penstock.costs.counting.graph import Graph
from penstock.sharding.layouts import I, Layout, R, S, State, layout_text
from penstock.sharding.plan import LayerSharding, Sharding
from penstock.trace.looks import KEPT, WAIT
from penstock.trace.page import Page, Section, Step, Table, Text, with_step
from penstock.trace.page.charts import COLOURS, Trace, axis_of, layout_of, rounded, spread
from penstock.trace.page.page import Figure
from penstock.trace.units import bytes_text, count_text

from .make_plan import HEADS, Choice
from .plan import Plan
from .plan_sharding import sharding_of
from .stage_rows import devices_text, mesh_text, span_text

_MOST_TICKS = 40
_LEAST_ROW_PX, _LEAST_PX, _MOST_PX = 44, 150, 900
_WORTH_A_WORD = 0.2
"""Least share of a layer's weights with a layout that its colour names."""
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
        total, axes = sum(weight.num_bytes for weight in self.weights), []
        for axis in range(len(self.weights[0].layout)):
            sums: dict[str, int] = defaultdict(int)
            for weight in self.weights:
                sums[weight.words[axis]] += weight.num_bytes
            worth = (words for words, size in sums.items() if size >= _WORTH_A_WORD * total)
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
    # 1. The timeline of the best candidate, and the table of candidates.
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
    folded = folded_rows(rows)
    parts: tuple[Table | Text, ...] = (Table(heads, tuple(folded), title),)
    if len(folded) < len(rows):
        parts = (*parts, Text(_FOLDED, "note"))
    rest = [
        Section("Candidates", parts),
        plan_section(plan, [row[-1] for row in rows if row[-1]]),
        Section("Cluster", (Text(str(cluster), "code"),)),
    ]
    if plan.predicted_stages is None:
        return replace(page, sections=(*page.sections, *rest))
    # 2. For stages on meshes also the layers and their weights.
    assert choice.task is not None, "its stages are on meshes"
    graph, names = choice.task.graph_of(plan.num_microbatches), choice.task.names
    sharding = None if plan.sharding is None else sharding_of(plan, graph, names)
    layers = drawn_layers(plan, graph, names, sharding)
    first = Section("Layers by stages", (layers_figure(plan, layers),))
    weights = Section("Weights", (weights_table(layers), Text(_LEGEND, "note")))
    return replace(page, sections=(first, *page.sections, weights, *rest), notes=(_NOTE,))


_FOLDED = "A row stands for all candidates of the same step, memory and micro-batches."
_MOST_NAMED = 4
"""Names in a cell of a folded row; more are counted."""


def folded_rows(rows: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Fold candidates into one row that differ in stages and schedule alone."""
    alike: dict[tuple[str, ...], list[Sequence[str]]] = defaultdict(list)
    names = {"stages": _STAGES, "schedule": _SCHEDULE}
    for row in rows:
        alike[tuple(cell for n, cell in enumerate(row) if n not in names.values())].append(row)
    return [
        tuple(
            _named([row[n] for row in group]) if n in names.values() else cell
            for n, cell in enumerate(group[0])
        )
        for group in alike.values()
    ]


_STAGES, _SCHEDULE = HEADS.index("stages"), HEADS.index("schedule")


def _named(cells: Sequence[str]) -> str:
    """Name different cells once, with a common start once ("11 layers on 2, 3"), and count those
    that are too many.
    """
    distinct = [*dict.fromkeys(cells)]
    starts = {cell.rpartition(" ")[0] for cell in distinct}
    start = starts.pop() if len(starts) == 1 else ""
    names = [cell.removeprefix(start).strip() for cell in distinct]
    rest = len(names) - _MOST_NAMED
    text = f"{start} {', '.join(names[:_MOST_NAMED])}".strip()
    return f"{text} and {rest} more" if rest > 0 else text


def plan_section(plan: Plan, said: Sequence[str] = ()) -> Section:
    """Write a plan as a section of a page, without what is `said` in another table."""
    heads, *rows = (tuple(row) for row in plan.rows)
    lines = dict.fromkeys(line for reason in plan.reasons for line in reason.splitlines())
    for end in said:
        lines = {line.removesuffix(f"; {end}").removesuffix(f", {end}"): None for line in lines}
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
    """Return each layer with the layouts of its weights; `graph` is a micro-batch's."""
    takes: dict[int, dict[int, None]] = defaultdict(dict)
    for call in graph.calls:
        takes[call.layer] |= dict.fromkeys(call.takes)
    drawn = []
    stages = [stage for stage, count in enumerate(plan.partition) for _ in range(count)]
    for n, stage in enumerate(stages):
        axes = plan.placement.shard_axes_of(stage)
        whole: Layout = (I,) * len(axes) if axes != (1,) else ()
        layer = LayerSharding(names[n], (), {}) if sharding is None else sharding.layers[n]
        weights = []
        for spec in map(graph.tensors.__getitem__, takes[n]):
            if spec.name and spec.wants_gradient:
                name = spec.name.removeprefix(f"{names[n]}.")
                layout = layer.weights.get(name, whole) if whole else whole
                weights.append(DrawnWeight(name, spec.shape, spec.num_bytes, layout))
        sent = layer.forward_bytes, layer.backward_bytes
        drawn.append(DrawnLayer(stage, names[n], tuple(weights), *sent))
    return drawn


def layers_figure(plan: Plan, layers: Sequence[DrawnLayer]) -> Figure:
    """Draw layers in order; the height of a block is the number of devices of its mesh."""
    # 1. A row for each stage, as high as its number of devices; rows do not overlap.
    sizes = [len(ranks[0]) for ranks in plan.placement.ranks]
    tops = list(accumulate(sizes, initial=0))
    px = min(max(_LEAST_ROW_PX / min(sizes), _LEAST_PX / tops[-1]), _MOST_PX / tops[-1])
    gap = 2 / px
    # 2. A bar for each layer, one trace and colour for each way to cut.
    kinds: dict[str, list[int]] = defaultdict(list)
    for n, layer in enumerate(layers):
        kinds[layer.cuts].append(n)
    data: list[Trace] = [
        {
            "type": "bar",
            "name": cuts,
            "x": members,
            "y": [rounded(sizes[layers[n].stage] - 2 * gap) for n in members],
            "base": [rounded(tops[layers[n].stage] + gap) for n in members],
            "width": 1,
            "marker": {"color": colour, "line": {"width": 1}},
            "customdata": [_hover(plan, layers[n]) for n in members],
            "hovertemplate": "%{customdata}<extra></extra>",
        }
        for (cuts, members), colour in zip(kinds.items(), _colours(kinds), strict=True)
    ]
    # 3. Axes: some layers below, meshes on the left; the ground and the sends of each row.
    count = len(layers)
    layout = layout_of(tops[-1] * px + 170, top=58, bottom=100, showlegend=True)
    ticks = spread(count, _MOST_TICKS)
    layout["xaxis"] = axis_of("layers, in order", range=[-0.5, count - 0.5], showgrid=False)
    layout["xaxis"] |= {"tickvals": ticks, "ticktext": [escape(layers[n].name) for n in ticks]}
    layout["xaxis"] |= {"automargin": True, "tickangle": -45}
    heads = (f"stage {n} on {mesh_text(plan, n)}" for n in range(plan.num_stages))
    where = (escape(devices_text(plan, n)) for n in range(plan.num_stages))
    layout["yaxis"] = {
        "range": [tops[-1], 0],
        "tickvals": [(a + b) / 2 for a, b in pairwise(tops)],
        "ticktext": [f"<b>{a}</b><br>{b}" for a, b in zip(heads, where, strict=True)],
        "fixedrange": True,
        "automargin": True,
        "showgrid": False,
    }
    # the ground behind the layers of a row
    ground: Trace = {"name": "ground", "type": "rect", "layer": "below", "line": {"width": 0}}
    ground |= {"x0": -0.5, "x1": count - 0.5}
    ends = ({"y0": rounded(a + gap), "y1": rounded(b - gap)} for a, b in pairwise(tops))
    layout["shapes"] = [{**ground, **end} for end in ends]
    layout["annotations"] = list(_links(plan, tops, count))
    return Figure("layers", tuple(data), layout)


def _colours(kinds: Iterable[str]) -> Iterator[str]:
    """Yield a colour for each way to cut; the usual ways have the same one on every page."""
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


def _links(plan: Plan, tops: Sequence[int], count: int) -> Iterator[Trace]:
    """Yield a note of the bytes that each mesh sends to the next, where their blocks meet.

    It stands in the row that is free there, on the side with more room.
    """
    before_last, ends = (plan.predicted_stages or ())[:-1], accumulate(plan.partition)
    for stage, (own, end) in enumerate(zip(before_last, ends, strict=False)):
        text = f"{bytes_text(own.sent_bytes)} a micro-batch"
        is_left = end > count / 2
        yield {
            "text": f"{text} ↴" if is_left else f"↳ {text}",
            "x": end - 0.5,
            "y": tops[stage + 1],
            "xanchor": "right" if is_left else "left",
            "yanchor": "top" if is_left else "bottom",
            "showarrow": False,
        }


def _hover(plan: Plan, layer: DrawnLayer) -> str:
    """Return the text of a block: its stage, mesh, and the layout of each weight."""
    lines = [f"<b>{escape(layer.name)}</b>, stage {layer.stage} on {mesh_text(plan, layer.stage)}"]
    for layout, weights in _by_layout(layer).items():
        names = ", ".join(weight.name for weight in weights)
        short = names if len(names) <= _MOST_LETTERS else f"{names[:_MOST_LETTERS]}..."
        lines.append(escape(f"{layout_text(layout)}  {short}".strip()))
    sent = layer.forward_bytes + layer.backward_bytes
    return "<br>".join([*lines, *([f"{bytes_text(sent)} sent by each device"] if sent else [])])


_MOST_LETTERS = 90


def _by_layout(layer: DrawnLayer) -> dict[Layout, list[DrawnWeight]]:
    weights: dict[Layout, list[DrawnWeight]] = defaultdict(list)
    for weight in layer.weights:
        weights[weight.layout].append(weight)
    return weights


def weights_table(layers: Sequence[DrawnLayer]) -> Table:
    """Tabulate the layouts of weights; layers of a stage with equal weights share a group of rows.

    A group has a row for each layout.  The first row also has the bytes that its layers send.
    """
    # 1. Group layers that have the same weights in the same layouts.
    alike: dict[object, list[DrawnLayer]] = defaultdict(list)
    for layer in layers:
        alike[layer.stage, layer.weights].append(layer)
    # 2. Write a row for each layout of a group; only the first names the group.
    rows = []
    for group in alike.values():
        first = group[0]
        count = f"{len(group)}: " if len(group) > 1 else ""
        name = count + span_text([layer.name for layer in group])
        both = zip(*((x.forward_bytes, x.backward_bytes) for x in group), strict=True)
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
    *("sent forward", "sent backward"),
)


def _names(weights: Sequence[DrawnWeight], *, is_all: bool) -> str:
    """Name weights with their shapes; vectors are only counted if there are others."""
    if is_all and len(weights) > 1:
        return f"all {len(weights)}"
    large = [weight for weight in weights if len(weight.shape) > 1 or len(weights) == 1]
    names = [f"{weight.name} {'x'.join(map(str, weight.shape))}" for weight in large]
    rest = len(weights) - len(large)
    return ", ".join([*names, *([count_text(rest, "vector")] if rest else [])])
