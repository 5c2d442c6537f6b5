"""Ready plans by name: each leaves some choices to every call, and the program picks of them."""

from collections.abc import Sequence

from penstock.costs.graph import Graph
from penstock.errors import ConfigError

from .layouts import S
from .plan import LayerSharding, Sharding
from .program import Allow, Site, plan_layer, routed_calls, why_whole
from .rules import Choice, Seen, base_name, unknown

_PRODUCTS = ("linear", "addmm", "matmul")


def _megatron(site: Site, axis: int, choice: Choice) -> bool:
    """Cut the weights of products, by columns and by rows in turn, and nothing along samples or
    positions (Shoeybi et al. 2019, section 3).
    """
    pairs = list(zip(choice.takes, site.weights, strict=True))
    cuts_a_weight = any(isinstance(state, S) for state, is_weight in pairs if is_weight)
    if not any(site.weights):
        return choice.cut == "" or _is_inside(site, choice)
    if base_name(site.call.function) in _PRODUCTS and _can_cut_a_weight(site):
        return cuts_a_weight
    return choice.cut == "" or cuts_a_weight


def _can_cut_a_weight(site: Site) -> bool:
    return any(
        isinstance(state, S)
        for own in site.by_axis
        for choice in own
        for state, is_weight in zip(choice.takes, site.weights, strict=True)
        if is_weight
    )


def _is_inside(site: Site, choice: Choice) -> bool:
    """Tell whether samples stay together: the first dimension of all is whole."""
    return S(0) not in (*choice.takes, *choice.gives)


READY: dict[str, Allow] = {"megatron": _megatron}


def plan_sharding(name: str, graph: Graph, layers: Sequence[str], mesh: Sequence[int]) -> Sharding:
    """Return a ready plan for the layers of a model, of these names, on a mesh with axes of these
    lengths.

    Layers that do the same are planned once.

    Raises:
        ConfigError: there is no plan of this name.
    """
    if name not in READY:
        raise ConfigError(f"sharding={name!r}: ready plans are {', '.join(map(repr, READY))}")
    known: dict[str, LayerSharding] = {}
    found = []
    for n, layer in enumerate(layers):
        signature = graph.signature(n)
        if signature not in known:
            known[signature] = plan_layer(graph, n, layer, mesh, READY[name])
        own = known[signature]
        found.append(LayerSharding(layer, own.calls, own.weights))
    numbers = range(len(layers))
    seen = [Seen.of(graph, call) for n in numbers for call in routed_calls(graph, n)]
    reasons = dict.fromkeys(filter(None, (why_whole(graph, n) for n in numbers)))
    return Sharding(tuple(mesh), tuple(found), (*unknown(seen), *reasons))
