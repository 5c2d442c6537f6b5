"""Divide the operators of all stages, one search for each, within one ready plan."""

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import chain, product

from penstock.costs.counting.graph import Graph, TensorSpec
from penstock.errors import ConfigError

from .costs import Costs
from .layouts import I, Layout, R, S, State, layout_of, layout_text
from .letters import Seen
from .named import ready_plan
from .plan import LayerSharding, Sharding
from .routed import own_weights, routed_calls, why_whole, with_end
from .rules import find, fits
from .search import Part, Search


def plan_sharding(  # noqa: PLR0913 - all that is asked for
    name: str,
    graph: Graph,
    layers: Sequence[str],
    costs: Costs | Sequence[Costs],
    stages: Sequence[Sequence[int]] | None = None,
    memory_limit_bytes: int | None = None,
    pins: Mapping[str, str] | None = None,
    *,
    compares: bool = False,
    to_loss: bool = False,
) -> Sharding:
    """Return a plan for the layers of a model.

    Args:
        name: the ready plan.
        graph: the calls of all layers.
        layers: the layers' names.
        costs: the costs of all stages together, or of each.
        stages: numbers of the layers of each stage; default: all in one.
        memory_limit_bytes: limit of weights, gradients, optimizer state and activations.
        pins: layouts of weights at rest by patterns of names, of which the first match counts.
        compares: add the next best choice of each call.
        to_loss: the last layer may leave its output in slices, which a loss takes.

    Raises:
        ConfigError: there is no plan of this name, or a weight cannot be held as it is pinned.
        PlanError: no plan stays below the limit; says by how much.
    """
    numbers = range(len(layers))
    ready = ready_plan(name)
    free = (own_weights(graph, routed_calls(graph, n)) for n in numbers if not why_whole(graph, n))
    may_be_cut = {*chain.from_iterable(free)}
    stages = stages or [numbers]
    of_stages = [costs] * len(stages) if isinstance(costs, Costs) else costs
    meshes = [stage_costs.mesh for stage_costs in of_stages]
    pinned = {mesh: _pinned(pins or {}, graph, may_be_cut, mesh) for mesh in meshes}
    # 1. Search the best plan of each stage.
    of_layer: dict[int, LayerSharding] = {}
    last = len(stages) - 1
    ended = with_end(graph, len(layers))
    has_end = bool(ended.of_layer(len(layers)))
    named = [*layers, "the code after the last layer"] if has_end else layers
    for n, (stage, stage_costs) in enumerate(zip(stages, of_stages, strict=True)):
        before, after = (meshes[k] if 0 <= k < len(meshes) else None for k in (n - 1, n + 1))
        ends, around = has_end and n == last, (pinned[stage_costs.mesh], before, after)
        numbered = [*stage, len(layers)] if ends else stage
        part = Part(numbered, *around, to_loss and n == last and not ends, ends)
        search = Search(ended, named, part, ready, stage_costs)
        chosen = search.within(memory_limit_bytes)
        chosen = search.compared(chosen) if compares else chosen
        of_layer.update(zip(numbered, search.ended(chosen), strict=True))
    # 2. Name the functions that run replicated, and the reasons for whole layers.
    seen = (Seen.of(graph, call) for n in numbers for call in routed_calls(graph, n))
    unknown = dict.fromkeys(x.call.function for x in seen if x.takes and find(x) is None)
    reasons = dict.fromkeys(filter(None, (why_whole(graph, n) for n in numbers)))
    plans = tuple(of_layer[n] for n in numbers)
    return Sharding(tuple(pinned), plans, (*unknown, *reasons), ready.keeps, ready.gathers)


def _pinned(
    pins: Mapping[str, str], graph: Graph, free: Collection[int], mesh: Sequence[int]
) -> dict[int, Layout]:
    """Return the pinned layouts of weights by number; weights in `free` may be cut."""
    layouts: dict[int, Layout] = {}
    specs = enumerate(graph.tensors)
    names = {n: spec.name for n, spec in specs if spec.name and spec.wants_gradient}
    for pattern, text in pins.items():
        matches = [n for n, name in names.items() if fnmatchcase(name, pattern)]
        if not matches:
            near = get_close_matches(pattern, names.values(), cutoff=0.3) or [*names.values()]
            raise ConfigError(
                f"sharding pins {pattern!r}, and no weight has such a name; near ones are "
                f"{', '.join(map(repr, near[:3]))}"
            )
        states = layout_of(text)
        if len(states) not in (1, len(mesh)):
            raise ConfigError(
                f"sharding pins {pattern!r} to {text!r}, states along {len(states)} axes, and the "
                f"shards of a stage have {len(mesh)}; give a state for each, or one for all"
            )
        layout = states * len(mesh) if len(states) == 1 else states
        for n in matches:
            _check_pin(graph.tensors[n], layout, mesh, is_free=n in free)
            layouts.setdefault(n, layout)
    return layouts


def _check_pin(spec: TensorSpec, layout: Layout, mesh: Sequence[int], *, is_free: bool) -> None:
    """Raise a ConfigError for a layout that a weight cannot have; it says which layouts remain."""
    if not is_free and set(layout) != {I}:
        raise ConfigError(
            f"sharding pins {spec.name!r} to {layout_text(layout)}, and it stays whole (I): "
            "several layers use it, or what its layer does cannot be divided; leave it out"
        )
    states: list[State] = [I, R, *(S(d) for d in range(len(spec.shape)))]
    layouts = product(states, repeat=len(mesh))
    remain = [candidate for candidate in layouts if fits(spec.shape, candidate, mesh)]
    if layout not in remain:
        raise ConfigError(
            f"sharding pins {spec.name!r} of shape {spec.shape} to {layout_text(layout)}, and on "
            f"{' x '.join(map(str, mesh))} shards some would have no slice of it; it may be "
            f"{', '.join(map(layout_text, remain))}"
        )
