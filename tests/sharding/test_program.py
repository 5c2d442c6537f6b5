"""The program finds what people divide by hand, and rules say what they may."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.costs.cluster import Cluster
from penstock.costs.cluster.collectives import Collective, collective_s
from penstock.costs.counting.count import record_graph
from penstock.costs.counting.graph import Graph, TensorSpec
from penstock.errors import PlanError
from penstock.mesh.collectives import Collectives
from penstock.model.layer_list import as_layers
from penstock.runtime.shards.divided import DividedLayer
from penstock.runtime.shards.kernels import kernel_of
from penstock.runtime.shards.sizes import Local, Sized
from penstock.sharding.costs import Costs
from penstock.sharding.layouts import I, P, R, S
from penstock.sharding.letters import Seen, base_name
from penstock.sharding.named import ready_plan
from penstock.sharding.plan import BUCKET_BYTES, PlannedCall, Sharding
from penstock.sharding.routed import routed_calls
from penstock.sharding.rules import TABLE, Choice, choices, divisions, fits, together
from penstock.sharding.search import Part, Search
from penstock.sharding.stages import plan_sharding
from penstock_recipes.zoo import transformer_lm
from tests.costs.cluster.collective_seconds import all_gather_s, all_reduce_s
from tests.costs.counting.counted import layers_of
from tests.model_parts import Does


def graph_of(*modules: nn.Module, shape: tuple[int, ...] = (2, 3, 8)) -> Graph:
    return record_graph(
        as_layers([nn.Identity(), *modules]), torch.randn(shape, requires_grad=True)
    )


def graph_weights(graph: Graph) -> list[TensorSpec]:
    return [spec for spec in graph.tensors if spec.name and spec.wants_gradient]


def choices_of(module: nn.Module, count: int = 2) -> tuple[Choice, ...]:
    graph = graph_of(module)
    (call,) = graph.of_layer(1)
    return choices(Seen.of(graph, call), count)


def test_an_operator_stands_in_one_row_of_the_table() -> None:
    names = [name for row in TABLE for name in row.split()]
    assert len(names) == len({*names})


def test_a_linear_layer_is_cut_along_rows_columns_and_what_it_sums_over() -> None:
    of_letters = {choice.cut: choice for choice in choices_of(nn.Linear(8, 4)) if choice.cut}
    assert of_letters["a"] == Choice((S(0), R, R), (S(0),), "a")
    assert of_letters["n"] == Choice((R, S(0), S(0)), (S(2),), "n")
    assert of_letters["k"] == Choice((S(2), S(1), P), (P,), "k")
    assert "a" not in {choice.cut for choice in choices_of(nn.Linear(8, 4), count=3)}  # 2 samples


def test_what_a_norm_looks_at_together_stays_whole() -> None:
    assert {choice.cut for choice in choices_of(nn.LayerNorm(8))} == {"", "a", "b"}


@pytest.mark.parametrize(
    ("function", "is_linear"),
    [
        (lambda x: x * 2, True),
        (lambda x: x / 2, True),
        (lambda x: x * x, False),
        (lambda x: 2 / x, False),
        (lambda x: torch.div(x, 2, rounding_mode="floor"), False),
        (lambda x: x @ x, False),
        (lambda x: x.view(torch.float32), False),
    ],
    ids=["x*2", "x/2", "x*x", "2/x", "floor", "x@x", "bits"],
)
def test_only_what_is_linear_gives_partial_sums_of_partial_sums(function, is_linear) -> None:
    graph = graph_of(Does(function), shape=(8, 8))
    (call,) = graph.of_layer(1)
    found = choices(Seen.of(graph, call), 2)
    assert any(P in choice.gives and P in choice.takes for choice in found) == is_linear


def test_a_dimension_that_is_called_axis_stays_whole_too() -> None:
    along_first = Does(lambda x: x.softmax(axis=0))
    assert {choice.cut for choice in choices_of(along_first)} == {
        "",
        "b",
        "c",
    }


class BiasFirst(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, bias=self.bias, weight=self.weight)


def test_arguments_may_be_named_in_any_order() -> None:
    of_letters = {choice.cut: choice for choice in choices_of(BiasFirst(8, 4))}
    assert of_letters["k"] == Choice((S(2), P, S(1)), (P,), "k")


def test_the_first_dimension_of_a_group_keeps_its_slices() -> None:
    graph = graph_of(Does(lambda x: x.view(2, 3, 4, 2).transpose(1, 2).flatten(2)))
    view, transpose, flatten = (Seen.of(graph, call) for call in graph.of_layer(1))
    assert Choice((S(2),), (S(2),), "c") in choices(view, 2)
    assert Choice((S(2),), (S(1),), "c") in choices(transpose, 2)
    assert all(S(3) not in choice.takes for choice in choices(flatten, 2))


def test_a_function_without_a_rule_is_done_by_all_alike_and_named() -> None:
    graph = graph_of(Does(lambda x: torch.fft.fft(x).real))
    found = plan_sharding("megatron", graph, ["0", "1"], Costs.usual((2,)))
    assert found.unknown == ("torch.fft.fft", "torch.Tensor.real.__get__")
    assert "done by all alike: torch.fft.fft, " in str(found)


class Changed(nn.Linear):
    """Changes what is new, or what it was given, or what a view of it is read after."""

    def __init__(self, change: str) -> None:
        super().__init__(8, 8)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        view = y[..., :4] if self.change == "viewed" else y
        changed = x * 1 if self.change == "another" else x.view(-1, 8)
        changed = y if self.change in ("new", "viewed") else changed
        F.relu(changed, inplace=True)
        return y + view.sum() + changed.sum()


@pytest.mark.parametrize(
    ("change", "may"), [("new", True), ("another", True), ("viewed", False), ("given", False)]
)
def test_only_what_nothing_shares_memory_with_is_changed_in_shards(change: str, may: bool) -> None:
    graph = graph_of(nn.Linear(8, 8), Changed(change))
    found = plan_sharding("megatron", graph, ["0", "1", "2"], Costs.usual((2,)))
    reason = "torch.nn.functional.relu changes a tensor in place"
    assert (reason in found.unknown) != may
    assert bool(found.layers[2].calls) == may


def test_groups_are_cut_between_them() -> None:
    graph = graph_of(nn.Conv1d(6, 6, 1, groups=3), shape=(1, 6, 4))
    (call,) = graph.of_layer(1)
    for count, cuts in ((3, True), (4, False)):  # six channels, in three groups
        letters = {choice.cut for choice in choices(Seen.of(graph, call), count)}
        assert ("g" in letters) == cuts


def test_a_layer_with_code_that_no_function_shows_is_done_by_all_alike() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0]  # nothing is run for it

    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Doubled.apply(super().forward(x))

    found = plan_sharding("megatron", graph_of(Twice(8, 8)), ["0", "1"], Costs.usual((2,)))
    assert not found.layers[1].is_divided
    assert "code that no function of torch shows" in str(found)


class Counted(nn.Linear):
    """Cuts what it makes into as many pieces as there are samples, and reads two."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = super().forward(x).split(1)[:2]
        return (first + second).expand(x.shape)


@pytest.mark.parametrize("number", [2, 4])
def test_a_call_with_another_number_of_results_takes_another_path(number: int) -> None:
    layer = Counted(8, 8)
    found = plan_sharding("data", graph_of(layer, shape=(3, 8)), ["0", "1"], Costs.usual((2,)))
    divided = DividedLayer(1, layer, found.layers[1], (Collectives(),))
    whole = torch.randn(3, 8)
    assert torch.equal(divided.call(partial(layer, whole), {}), layer(whole))
    inputs = torch.randn(number, 8)
    with pytest.raises(PlanError) as raised:
        divided.call(partial(layer, inputs), {})
    assert f"split with {number} results as its call 1, where its" in str(raised.value)
    assert "sharding calls it with 3: its forward takes another path" in str(raised.value)


def test_names_are_one_however_a_function_is_spelled() -> None:
    spelled = ("torch.add", "torch.Tensor.__add__", "torch.Tensor.__radd__", "torch.Tensor.add_")
    assert {base_name(function) for function in spelled} == {"add"}


def test_the_columns_and_rows_of_megatron_are_found() -> None:
    words = torch.randint(0, 16, (2, 8))
    model = transformer_lm(2, width=16, ff_width=32, num_heads=4, num_words=16, dropout=0.0)
    layers = layers_of(model, words)
    names = [step.path for step in layers]
    found = plan_sharding("megatron", record_graph(layers, words), names, Costs.usual((2,)))
    block = found.layers[1]
    weights = {name: state for name, state in block.weights.items() if name.endswith("weight")}
    assert {
        name.split(".")[-2]: state for name, state in weights.items() if "norm" not in name
    } == {
        **dict.fromkeys(("query", "key", "value", "widen"), (S(0),)),
        **dict.fromkeys(("output", "narrow"), (S(1),)),
    }
    assert block.weights["norm.weight"] == (I,)
    sums = 2 * 2 * 2 * 8 * 16 * 4 // 2  # two all-reduces of what a block adds to, each way
    assert block.forward_bytes == block.backward_bytes == sums
    assert "blocks" in str(found) or f"as {names[1]}" in str(found)


def test_choices_of_all_axes_together_leave_each_device_something() -> None:
    graph = graph_of(nn.Linear(3, 8), shape=(4, 3))
    (call,) = graph.of_layer(1)
    seen = Seen.of(graph, call)
    for mesh, may in (((2, 2), False), ((3, 1), True)):  # three channels
        found = together(seen, divisions(seen, mesh), mesh)
        assert any(own[0].cut == own[1].cut == "k" for own in found) == may
        assert all(
            fits(shape, layout, mesh)
            for own in found
            for shape, layout in zip(
                seen.takes, zip(*(choice.takes for choice in own), strict=True), strict=True
            )
        )


def test_a_limit_of_memory_is_kept_at_the_least_cost() -> None:
    words = torch.randint(0, 16, (4, 8))
    model = transformer_lm(1, width=16, ff_width=32, num_heads=4, num_words=16, dropout=0.0)
    layers = layers_of(model, words)
    graph, names, costs = record_graph(layers, words), [s.path for s in layers], Costs.usual((2,))

    def num_bytes(sharding: Sharding) -> float:
        own = enumerate(zip(names, sharding.layers, strict=True))
        return sum(costs.layer_bytes(graph, routed_calls(graph, n), *x) for n, x in own)

    free = plan_sharding("auto", graph, names, costs)
    limit = round(num_bytes(free) * 0.7)
    assert num_bytes(plan_sharding("auto", graph, names, costs, None, limit)) <= limit
    with pytest.raises(PlanError, match="the least found is"):
        plan_sharding("auto", graph, names, costs, None, limit // 10)


class Attends(nn.Module):
    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, x: Tensor) -> Any:
        query, key, value = x.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind()
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)


@pytest.mark.parametrize("causal", (True, False))
def test_later_queries_of_a_causal_mask_have_more_to_do(causal: bool) -> None:
    graph = graph_of(Attends(causal=causal), shape=(4, 512, 96))
    (call,) = (each for each in graph.of_layer(1) if "attention" in each.function)
    costs = Costs((4,), Cluster.load("dgx-a100"))
    options = choices(Seen.of(graph, call), 4)
    by_cut = {x.gives[0].dim: x for x in options if isinstance(x.gives[0], S)}
    sequences, queries = (
        costs.call_s(graph, call, PlannedCall(call.function, (by_cut[dim],))) for dim in (0, 2)
    )
    assert queries / sequences == pytest.approx(2 - 1 / 4 if causal else 1.0)


@pytest.mark.parametrize("heads", (4, 2))
@pytest.mark.parametrize("rank", (0, 1))
def test_a_slice_of_queries_attends_to_what_comes_before_it(rank: int, heads: int) -> None:
    """Seven positions in slices of 4 and 3; four heads of queries, and as many or two of keys."""
    query, key, value = torch.randn(4, 7, 8), torch.randn(heads, 7, 8), torch.randn(heads, 7, 8)
    how: Any = {"is_causal": True, "enable_gqa": heads < 4}
    whole = F.scaled_dot_product_attention(query, key, value, **how)
    kernel = kernel_of("torch.nn.functional.scaled_dot_product_attention")
    layout = (S(1, (4, 3)),)
    local: Any = Local(Sized(((),), (layout,)), (Collectives(rank=rank, ranks=range(2)),))
    here = slice(0, 4) if rank == 0 else slice(4, 7)
    assert kernel is not None
    found = kernel(F.scaled_dot_product_attention, (query[:, here], key, value), how, local)
    assert torch.allclose(found, whole[:, here], atol=1e-6)


def test_what_is_done_once_a_step_is_in_no_microbatch() -> None:
    """Sums of gradients of data and ZeRO-1, and gathers of ZeRO-1, run once; gathers of ZeRO-2 are
    shared by the micro-batches; its sums and all of ZeRO-3 are done for each.
    """
    graph = graph_of(nn.Linear(64, 64, bias=False), shape=(4096, 64))
    one = replace(Costs.usual((2,)), cuda_graphs=True)  # bound by devices, not by a host
    (weight,) = graph_weights(graph)

    def seconds(plan: str, num_microbatches: int) -> tuple[float, float]:
        costs = replace(one, num_microbatches=num_microbatches)
        search = Search(graph, ["0", "1"], Part(range(2)), ready_plan(plan), costs)
        ranges = search.of_ranges()
        return float(ranges.seconds[0, 2]), float(ranges.once_s[0, 2])

    each = {n: [seconds(n, m) for m in (1, 4)] for n in ("data", "zero1", "zero2", "zero3")}
    gather_s = all_gather_s(one.cluster, [0, 1], weight.num_bytes)
    sum_once_s, gather_once_s = (
        in_bucket_s(f, one.cluster, [0, 1], weight.num_bytes) for f in (all_reduce_s, all_gather_s)
    )
    shared = {n: first[0] - second[0] for n, (first, second) in each.items()}
    wanted = {"data": 0.0, "zero1": 0.0, "zero2": 3 / 4 * gather_s, "zero3": 0.0}
    assert shared == pytest.approx(wanted, abs=1e-12)
    for number in (0, 1):
        once = {n: of_numbers[number][1] for n, of_numbers in each.items()}
        wanted = {"data": sum_once_s, "zero1": sum_once_s + gather_once_s}
        wanted |= {"zero2": 0.0, "zero3": 0.0}
        assert once == pytest.approx(wanted, abs=1e-12)


def in_bucket_s(
    collective: Callable[..., float], cluster: Cluster, group: Sequence[int], num_bytes: float
) -> float:
    """Return the share of a small tensor in the collective of its bucket."""
    return collective(cluster, group, BUCKET_BYTES) * num_bytes / BUCKET_BYTES


def test_all_groups_of_an_axis_share_the_card_of_their_host() -> None:
    cluster = Cluster.load("2 x p3.16xlarge")
    costs = Costs((2, 8), cluster)
    (weight,) = graph_weights(graph_of(nn.Linear(4096, 4096, bias=False), shape=(8, 4096)))
    groups = {0: [[n, n + 8] for n in range(8)], 1: [[*range(8)], [*range(8, 16)]]}
    for axis, at_rest in enumerate(((R, I), (I, R))):
        sum_s = costs.once_s(weight, at_rest)
        alone_s = all_reduce_s(cluster, groups[axis][0], weight.num_bytes)
        kind, num_bytes = Collective.ALL_REDUCE, weight.num_bytes
        assert sum_s == collective_s(cluster, groups[axis], kind, num_bytes)
        assert sum_s / alone_s == pytest.approx((8, 1)[axis], rel=1e-2)


def test_a_weight_that_is_cut_along_two_axes_is_gathered_along_the_last_one_first() -> None:
    """As it is run: the inner axis gathers what the outer one has a slice of."""
    costs = replace(Costs.usual((2, 2)), gathers=True)
    (weight,) = graph_weights(graph_of(nn.Linear(64, 32, bias=False), shape=(8, 64)))
    first_s = in_bucket_s(all_gather_s, costs.cluster, [0, 1], weight.num_bytes / 2)
    then_s = in_bucket_s(all_gather_s, costs.cluster, [0, 2], weight.num_bytes)
    assert costs.once_s(weight, (I, I)) == pytest.approx(first_s + then_s)
    assert sum(costs.weight_bytes(weight, (I, I))) == weight.num_bytes * (1 + 1 + (1 + 2) / 4)
