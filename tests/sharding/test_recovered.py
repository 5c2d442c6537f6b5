"""The program finds, without a name, what people found: at sizes at which it is best."""

from collections.abc import Sequence
from copy import deepcopy

import pytest
import torch
from torch import nn

from penstock.costs.counting.count import record_graph
from penstock.model.layer_list import as_layers
from penstock.sharding.costs import Costs
from penstock.sharding.layouts import Layout, R, S
from penstock.sharding.letters import base_name
from penstock.sharding.plan import LayerSharding, PlannedCall
from penstock.sharding.routed import routed_calls
from penstock.sharding.stages import plan_sharding
from penstock_recipes.zoo import gpt
from tests.sharding.cases_language import GShardBlock, Mixture

COLUMNS, ROWS = ("query", "key", "value", "widen"), ("output", "narrow")
Found = tuple[LayerSharding, float]
"""The plan of a layer, and the bytes that stay on a device for it."""


def found_for(
    layer: nn.Module,
    shape: Sequence[int],
    num_microbatches: int = 1,
    *,
    memory_limit_bytes: int | None = None,
    dtype: torch.dtype = torch.float16,
    name: str = "auto",
) -> Found:
    """Let a ready plan divide four such layers, one after the other, among eight devices that are
    well connected; return what it does with one in between.  Both ends of the model are whole.
    """
    layers = [nn.Identity(), *(deepcopy(layer.to(dtype)) for _ in range(4)), nn.Identity()]
    with torch.device("meta"):
        inputs = torch.empty(tuple(shape), dtype=dtype, requires_grad=True)
    graph = record_graph(as_layers(layers), inputs)
    names, costs = [str(n) for n in range(len(layers))], Costs.usual((8,), num_microbatches)
    found = plan_sharding(name, graph, names, costs, None, memory_limit_bytes).layers[2]
    return found, costs.layer_bytes(graph, routed_calls(graph, 2), "2", found)


def gpt_block(width: int, num_heads: int) -> nn.Module:
    with torch.device("meta"):
        model = gpt(num_layers=1, width=width, num_heads=num_heads, num_words=64, max_length=2048)
    return next(part for part in model.modules() if type(part).__name__.endswith("Block"))


def calls_of(plan: LayerSharding, *names: str) -> list[PlannedCall]:
    return [call for call in plan.calls if base_name(call.function) in names]


def weights_of(plan: LayerSharding, *modules: str) -> set[Layout]:
    """Return the layouts of the weights of products with such names."""
    return {
        layout
        for name, layout in plan.weights.items()
        if name.endswith("weight") and name.split(".")[-2] in modules
    }


def gives(calls: Sequence[PlannedCall]) -> set[Layout]:
    return {layout for call in calls for layout in call.gives}


def test_megatron_with_norms_along_positions_for_a_small_batch() -> None:
    """Shoeybi et al. 2019; Korthikanti et al. 2022."""
    plan, _ = found_for(gpt_block(12288, 96), (2, 2048, 12288))
    assert weights_of(plan, *COLUMNS) == {(S(0),)}
    assert weights_of(plan, *ROWS) == {(S(1),)}
    assert gives(calls_of(plan, "scaled_dot_product_attention")) == {(S(1),)}  # heads
    assert gives(calls_of(plan, "layer_norm", "add")) == {(S(1),)}  # positions
    assert weights_of(plan, "norm") == {(R,)}


@pytest.mark.parametrize(
    ("num_microbatches", "rest"), [(8, {(S(0),), (S(1),)}), (128, {(R,)})], ids=["8", "128"]
)
def test_heads_are_exchanged_for_positions_where_sums_of_gradients_are_shared(
    num_microbatches: int, rest: set[Layout]
) -> None:
    """An all-to-all before the output projection, whose weight is whole; with more micro-batches
    the feed-forward part is whole as well.
    """
    plan, _ = found_for(gpt_block(12288, 96), (2, 2048, 12288), num_microbatches)
    assert gives(calls_of(plan, "scaled_dot_product_attention")) == {(S(1),)}
    assert weights_of(plan, "output") == {(R,)}
    output = calls_of(plan, "linear")[3]
    assert output.takes[0] == output.gives[0] == (S(1),)
    assert weights_of(plan, "query", "key", "value") == {(S(0),)}
    assert weights_of(plan, "widen", "narrow") == rest


def test_plain_data_parallelism_for_a_large_batch() -> None:
    plan, _ = found_for(gpt_block(1024, 16), (64, 1024, 1024))
    assert gives(plan.calls) == {(S(0),)}
    assert set(plan.weights.values()) == {(R,)}
    assert plan.forward_bytes == plan.backward_bytes == 0  # but for the sums of gradients


def test_weights_are_cut_as_the_limit_of_memory_falls() -> None:
    """From data parallelism to the third stage of ZeRO (Rajbhandari et al. 2020)."""
    block, shape = gpt_block(2048, 16), (64, 1024, 2048)
    plan, free = found_for(block, shape)
    weights = 8 * sum(p.numel() for p in block.parameters())  # with gradients and Adam's state
    assert set(plan.weights.values()) == {(R,)}
    cut, sent = [0], [0]
    for share in (0.2, 0.5, 0.8):
        limit = 4 * round(free - share * weights)
        plan, _ = found_for(block, shape, memory_limit_bytes=limit)
        assert gives(plan.calls) == {(S(0),)}
        cut.append(sum(isinstance(state, S) for (state,) in plan.weights.values()))
        sent.append(plan.forward_bytes + plan.backward_bytes)
    assert cut == sorted(cut) and cut[1] > 0
    assert sent == sorted(sent) and sent[1] > 0
    assert weights_of(plan, *COLUMNS, *ROWS) <= {(S(0),), (S(1),)}


def test_experts_are_dealt_out_and_positions_exchanged() -> None:
    """Lepikhin et al. 2020: samples are cut outside of experts, experts inside."""
    with torch.device("meta"):
        layer = Mixture(experts=16, places=256, width=1024, ff_width=4096)
    plan, _ = found_for(layer, (16, 1024, 1024))
    assert plan.weights["up"] == plan.weights["down"] == (S(0),)
    assert gives(calls_of(plan, "bmm")) == {(S(0),)}  # of experts
    given, combined = calls_of(plan, "einsum")
    assert given.gives == ((S(1),),)  # (experts, samples, places, width)
    assert combined.takes == ((S(0),), (S(1),))


@pytest.mark.parametrize("name", ["auto", "expert"])
def test_experts_of_the_zoos_gshard_are_dealt_out_and_rows_exchanged(name: str) -> None:
    """Lepikhin et al. 2020: who goes where is decided for own samples, for all their experts."""
    with torch.device("meta"):
        layer = GShardBlock(width=1024, num_experts=16, capacity_factor=1.0)
    plan, _ = found_for(layer, (16, 1024, 1024), name=name)
    assert {own for n, own in plan.weights.items() if ".experts." in n} == {(S(0),)}
    assert weights_of(plan, "gate") == {(R,)}
    of_samples = calls_of(plan, "softmax", "made_like", "cumsum", "scatter", "gather")
    assert gives(of_samples) == {(S(0),)}
    assert gives(calls_of(plan, "baddbmm")) == {(S(0),)}  # of experts
    rows = 2 * 16 * 1024 * 1024  # bytes in float16 of all samples, and two for each position
    exchanged = [call.forward_bytes for call in calls_of(plan, "flatten")[-2:]]
    assert exchanged == [2 * rows // 8 * 7 // 8] * 2


class Bottleneck(nn.Sequential):
    def __init__(self, channels: int, wide: int) -> None:
        super().__init__(
            *(nn.Conv2d(channels, wide, 1), nn.BatchNorm2d(wide), nn.ReLU()),
            *(nn.Conv2d(wide, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU()),
            *(nn.Conv2d(wide, channels, 1), nn.BatchNorm2d(channels), nn.ReLU()),
        )


def test_channels_are_cut_where_there_are_many_and_few_images() -> None:
    """Wide-ResNet, as Zheng et al. 2022 divide it: the last convolution sums over channels."""
    with torch.device("meta"):
        layer = Bottleneck(1024, 4096)
    plan, _ = found_for(layer, (8, 1024, 7, 7), dtype=torch.float32)
    first, second, third = calls_of(plan, "conv2d")
    assert first.gives == second.gives == ((S(1),),)
    assert plan.weights["0.weight"] == plan.weights["3.weight"] == (S(0),)
    assert third.takes[0] == (S(1),) and plan.weights["6.weight"] == (S(1),)
