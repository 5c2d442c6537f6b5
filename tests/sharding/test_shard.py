"""What a user asks of the division of operators is done, or refused with what remains."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.costs.counting.count import record_graph
from penstock.errors import ConfigError, PlanError
from penstock.model.layer_list import as_layers
from penstock.sharding.costs import Costs
from penstock.sharding.layouts import I, P, R, S
from penstock.sharding.named import READY
from penstock.sharding.plan import Sharding
from penstock.sharding.program import LayerProgram, Site, Task
from penstock.sharding.routed import routed_calls
from penstock.sharding.rules import Choice
from penstock.sharding.stages import plan_sharding
from penstock_recipes.zoo import gpt

WORDS = torch.zeros(4, 8, dtype=torch.long)


def model() -> nn.Module:
    sizes: dict[str, Any] = {"width": 16, "num_heads": 4, "num_words": 32, "max_length": 8}
    with torch.device("meta"):
        return gpt(num_layers=2, **sizes)


def planned(sharding: Any, num_shards: int | tuple[int, ...] = 2, **how: Any) -> Sharding:
    return penstock.shard(model(), WORDS, num_shards, sharding=sharding, **how)


def weights_of(found: Sharding) -> dict[str, Any]:
    own = (layer.weights.items() for layer in found.layers)
    names = (layer.name for layer in found.layers)
    return {f"{name}.{n}": w for name, pairs in zip(names, own, strict=True) for n, w in pairs}


def test_pinned_weights_are_held_so_and_the_rest_is_as_without_pins() -> None:
    pins = {"blocks.1.*.widen.weight": "S(1)", "blocks.1.*.widen.*": R}
    found = weights_of(planned({"plan": "megatron", **pins}))
    free = weights_of(planned("megatron"))
    changed = {name for name in free if found[name] != free[name]}
    assert found["blocks.1.feed_forward.widen.weight"] == (S(1),)  # of two patterns, the first
    assert found["blocks.1.feed_forward.widen.bias"] == (R,)
    assert changed
    assert all(name.startswith("blocks.1.") for name in changed)  # nor the block that is alike


def test_a_state_is_for_each_axis_or_for_all() -> None:
    pins = {
        "blocks.*.widen.weight": "S(1)·R",
        "blocks.*.narrow.weight": (R, S(0)),
        "norm.weight": I,
    }
    found = weights_of(planned({"plan": "megatron", **pins}, (2, 2)))
    assert found["blocks.0.feed_forward.widen.weight"] == (S(1), R)
    assert found["blocks.1.feed_forward.narrow.weight"] == (R, S(0))
    assert found["norm.weight"] == (I, I)


@pytest.mark.parametrize(
    ("pins", "num_shards", "words"),
    [
        ({"blocks.*.wide.weight": "R"}, 2, r"no weight has such a name; near ones are 'blocks"),
        ({"*.widen.bias": "S(1)"}, 2, r"of shape \(64,\) to S\(1\), .*; it may be I, R, S\(0\)$"),
        ({"norm.weight": "S(0)"}, 32, r"some would have no slice .*; it may be I, R$"),
        ({"head.weight": "P"}, 2, r"pins 'head.weight' to 'P'; a weight at rest is 'I'"),
        ({"head.weight": 3}, 2, r"pins 'head.weight' to '3'; a weight at rest is 'I'"),
        ({"norm.weight": "R·R"}, 2, r"states along 2 axes, and the shards of a stage have 1"),
        ({"plan": "alpa"}, 2, r"ready plans are 'auto', 'megatron'"),
        ({3: "R"}, 2, "give the name of a ready plan, or a mapping"),
        (7, 2, "sharding=7; give the name of a ready plan, or a mapping"),
        ({"memory_limit_bytes": 0}, 2, "memory_limit_bytes=0; it must be a whole number"),
    ],
)
def test_what_cannot_be_pinned_is_refused_with_what_remains(pins, num_shards, words) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        planned(pins, num_shards)
    assert "\n" not in str(raised.value)


def test_a_weight_that_several_layers_use_stays_whole() -> None:
    with pytest.raises(ConfigError, match=r"words.weight' to S\(0\), and it stays whole"):
        planned({"embedding.words.weight": "S(0)"})
    planned({"plan": "megatron", "embedding.words.weight": "I"})


def test_a_limit_of_memory_leads_to_a_plan_below_it_or_says_how_much_is_missing() -> None:
    layers, batch = [nn.Linear(64, 64), nn.LayerNorm(64)], torch.zeros(2, 64)

    def held(limit: int | None, sharding: Any = "auto") -> dict[str, Any]:
        found = penstock.shard(layers, batch, 2, sharding=sharding, memory_limit_bytes=limit)
        return weights_of(found)

    num_bytes = 4 * 4 * sum(p.numel() for layer in layers for p in layer.parameters())
    limit = num_bytes * 3 // 4
    assert held(None)["0.weight"] == (I,)
    assert isinstance(held(limit)["0.weight"][0], S)
    assert held(None, {"memory_limit_bytes": limit}) == held(limit)
    with pytest.raises(PlanError, match=r"least found is .*, [\d.]+ KiB more\. Use more"):
        held(num_bytes // 4)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"num_shards": 0}, "num_shards=0; it must be a whole number of at least 1"),
        ({"num_shards": (2, 0)}, "num_shards=0; it must be"),
        ({"num_shards": 16, "cluster": penstock.Cluster.load("dgx-a100")}, "asks for 16 devices"),
    ],
)
def test_devices_that_cannot_be_are_refused(how: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        planned("megatron", **how)


class Products(nn.Sequential):
    """Two products in one layer."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


@pytest.mark.parametrize("kind", [Products, lambda: nn.Linear(64, 64)], ids=["three", "one"])
def test_the_next_best_way_takes_as_much_longer_as_it_says(kind: Callable[[], nn.Module]) -> None:
    graph = record_graph(as_layers([kind()]), torch.zeros(64, 64))
    costs = Costs.usual((2,))
    (plan,) = plan_sharding("auto", graph, ["0"], costs, compares=True).layers
    for k, call in enumerate(plan.calls):
        assert call.instead is not None
        assert tuple(own.cut for own in call.instead.choices) != call.cuts

        def least(k: int, wanted: tuple[Choice, ...] | None) -> float:
            """Return the seconds of the best plan in which call k is divided as wanted."""
            target = routed_calls(graph, 0)[k]

            def allow(site: Site, axis: int, choice: Choice) -> bool:
                return wanted is None or site.call != target or choice == wanted[axis]

            task = Task(costs=costs, allow=allow, rests=READY["auto"].rests)
            return LayerProgram(graph, 0, task, {}).solve().seconds

        best, forced = least(k, None), least(k, call.instead.choices)
        assert best <= forced <= best + call.instead.more_s + 1e-12  # the others stay as they are
        if len(plan.calls) == 1:
            assert forced == pytest.approx(best + call.instead.more_s, abs=1e-12)


def test_a_table_names_the_next_best_and_counts_what_leaves_a_layer() -> None:
    layers: list[nn.Module] = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)]
    found = penstock.shard(layers, torch.zeros(2, 64), 2, sharding="megatron")
    products = penstock.shard([Products()], torch.zeros(2, 64), 2, sharding="megatron")
    assert "next best" in str(found)
    (block,) = products.layers
    assert block.calls[-1].gives == ((P,),)
    assert block.forward_bytes == 2 * 64 * 4  # the sum of two devices' parts: half of it, twice


class Routed(nn.Linear):
    """Reads a value while it runs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() > 0 else x


def test_who_reads_values_is_named_to_be_declared_opaque() -> None:
    layers = [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), Routed(8, 8))]
    with pytest.raises(ConfigError, match=r"layer '1' .* or declare tests\.\S+\.Routed opaque"):
        penstock.shard(layers, torch.zeros(2, 8), 2)


class Scaled(nn.Module):
    """Scales all samples by one row, which is made in it and used nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[None]


def test_what_stays_in_a_layer_does_not_keep_its_samples_together() -> None:
    layers = [nn.Linear(8, 8), Scaled(), nn.Linear(8, 8)]
    found = penstock.shard(layers, torch.zeros(4, 8), 2, sharding="data").layers
    assert [layer.num_entering for layer in found] == [0, 1, 1]
    assert [[*layer.leaving.values()] for layer in found] == [[(S(0),)], [(S(0),)], []]
