"""A layout by its usual words: its stages and devices, its step, and what does not divide."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock import Parallelism
from penstock.costs.layer_facts import LayerFacts
from penstock.errors import ConfigError
from penstock.planner.mesh_plans import meshes_of
from penstock.schedules import ReduceGradients
from penstock.trace.timeline import MemoryKind
from tests.few_devices import cluster

BLOCKS = [LayerFacts.of(str(n), "Block", 100, {"w": (10, 10)}) for n in range(8)]
LAYERS = [LayerFacts.of("words", "Embedding", 900, {}), *BLOCKS, LayerFacts.of("head", "L", 9, {})]


@cache
def counted(num_layers: int, num_samples: int = 4) -> penstock.Profile:
    """Return the counted costs of equal layers."""
    with torch.device("meta"):
        layers = [nn.Linear(64, 64) for _ in range(num_layers)]
        inputs = torch.empty(num_samples, 64)
    return penstock.profile(layers, inputs, measure=False, torch_type="cpu")


def attending(heads: int, num_kv_heads: int) -> nn.Module:
    """Return a layer of attention on the meta device."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Linear(48, heads * 8)
            self.keys = nn.Linear(48, num_kv_heads * 8)
            self.out = nn.Linear(heads * 8, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            both = self.queries(x), self.keys(x)
            q, k = (each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in both)
            values = nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
            output: torch.Tensor = self.out(values.transpose(1, 2).flatten(2))
            return output

    with torch.device("meta"):
        return Attention()


@pytest.mark.parametrize(
    ("pipeline", "virtual", "number"), [(1, 1, 3), (4, 1, 8), (2, 4, 6), (4, 2, 7), (2, 2, 5)]
)
def test_a_step_on_fast_links_is_its_work_and_the_bubble(
    pipeline: int, virtual: int, number: int
) -> None:
    """(M v + p - 1) stages of time, where p divides M (Narayanan et al. 2021, section 2.2)."""
    profile, hosts = counted(8), cluster(4, near=1e18)
    layout = Parallelism(
        pipeline=pipeline, virtual=virtual, data=1, microbatch_size=4, num_microbatches=number
    )
    plan = penstock.plan(profile, hosts, parallelism=layout)
    assert plan.predicted_s is not None and len(plan.predicted_s) == pipeline * virtual
    whole = number if virtual == 1 else -(-number // pipeline) * pipeline
    least_s = (number * virtual + pipeline - 1) * min(plan.predicted_s)
    most_s = (whole * virtual + pipeline - 1) * max(plan.predicted_s)
    step_s = float(penstock.simulate(profile, hosts, layout).step_s)
    assert most_s < 1.5 * least_s or whole > number
    assert least_s * (1 - 1e-6) <= step_s <= most_s * (1 + 1e-6)


def test_the_first_layers_of_each_stage_are_recomputed_and_cost_their_part() -> None:
    hosts, plans = cluster(4, near=1e18), {}
    for number in (None, 1, 2, 4):
        layout = Parallelism(
            pipeline=2, data=1, microbatch_size=4, num_microbatches=4,
            recompute="layers", recompute_num_layers=number,
        )  # fmt: skip
        plans[number] = penstock.plan(counted(8), hosts, parallelism=layout)
    never = Parallelism(pipeline=2, data=1, microbatch_size=4, num_microbatches=4)
    none = penstock.plan(counted(8), hosts, parallelism=never)
    assert plans[1].recompute == (penstock.Recompute.layers(0, 4),) * 2
    assert [plans[2].recomputed(stage) for stage in range(2)] == [(0, 1), (4, 5)]
    assert [row[3] for row in plans[2].rows[1:]] == ["layers 0, 1", "layers 4, 5"]
    seconds = [(plan.predicted_s or ())[0] for plan in (none, plans[1], plans[2], plans[4])]
    forward_s = (none.predicted_stages or ())[0].forward_s
    more = [later - before for before, later in pairwise(seconds)]
    # the first layer of the model does a little more than the others
    assert more == pytest.approx([forward_s / 4, forward_s / 4, forward_s / 2], rel=0.1)
    assert sum(more) == pytest.approx(forward_s)
    assert plans[4].predicted_step_s == plans[None].predicted_step_s


def test_a_layout_is_a_plan_on_its_devices() -> None:
    layout = Parallelism(tensor=2, pipeline=2, virtual=2, microbatch_size=2, zero=1)
    plan = penstock.plan(counted(8, 8), cluster(4, 4), 32, parallelism=layout)
    assert (plan.partition, plan.num_microbatches, plan.batch_size) == ((2, 2, 2, 2), 8, 32)
    assert [mesh[0] for mesh in plan.placement.ranks] == [(0, 1, 2, 3), (4, 5, 6, 7)] * 2
    assert plan.placement.shard_axes == (2, 2) and plan.sharding == "grid+zero1"
    assert plan.schedule == penstock.schedules.interleaved_1f1b(2)
    assert penstock.Plan.from_json(plan.to_json()) == plan
    assert plan.predicted_step_s is not None and "layers as given" in str(plan)
    assert plan.why == (
        "the layout was given: tensor=2, pipeline=2, virtual=2, microbatch_size=2, zero=1",
    )


def test_meshes_may_be_of_any_number_of_devices_over_the_borders_of_hosts() -> None:
    meshes = meshes_of(Parallelism(tensor=2, pipeline=2), cluster(4, 4, 4), 3)
    assert [(mesh.devices, mesh.num_hosts, mesh.shape) for mesh in meshes] == [
        ((0, 1, 2, 3, 4, 5), 2, (3, 2)),
        ((6, 7, 8, 9, 10, 11), 2, (3, 2)),
    ]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [0, 10]),
        ({"pipeline": 2}, [0, 5, 10]),
        ({"pipeline": 2, "virtual": 2}, [0, 3, 5, 7, 10]),
        ({"pipeline": 2, "partition": (9, 1)}, [0, 9, 10]),
        ({"pipeline": 2, "virtual": 2, "partition": "E,t*3|(t|)*2tttL"}, [0, 4, 5, 6, 10]),
        ({"pipeline": 4, "partition": "E|(tt|t*2|)*2L"}, None),
        ({"pipeline": 6, "partition": "E|(tt|t*2|)*2L"}, [0, 1, 3, 5, 7, 9, 10]),
    ],
)
def test_stages_are_equal_shares_or_as_given(
    options: dict[str, Any], wanted: list[int] | None
) -> None:
    if wanted is None:
        with pytest.raises(ConfigError, match=r"has 6 stages of \[1, 2, 2, 2, 2, 1\] layers"):
            Parallelism(**options).stages(LAYERS)
    else:
        assert Parallelism(**options).stages(LAYERS) == [*pairwise(wanted)]


@pytest.mark.parametrize(
    ("tensor", "rows", "options", "wanted"),
    [
        (1, 1, {}, "data"),
        (1, 4, {"zero": 3}, "zero3"),
        (2, 1, {}, "megatron"),
        (2, 1, {"sequence": True}, "sequence"),
        (2, 4, {}, "grid"),
        (2, 4, {"sequence": True, "zero": 1}, "grid+sequence+zero1"),
        (1, 4, {"expert": 4}, "expert"),
        (1, 1, {"context": 2}, "context"),
        (1, 4, {"context": 2, "zero": 1}, "data+context+zero1"),
        (2, 1, {"context": 2, "sequence": True}, "context+sequence"),
        (2, 4, {"context": 2, "sequence": True}, "data+context+sequence"),
        (1, 4, {"expert": 2, "zero": 1}, "data+expert+zero1"),
    ],
)
def test_words_are_ready_plans(
    tensor: int, rows: int, options: dict[str, Any], wanted: str
) -> None:
    assert Parallelism(tensor=tensor, **options).sharding(rows) == wanted


@pytest.mark.parametrize(
    ("options", "batch_size", "error"),
    [
        ({"tensor": 3}, 8, "= 3 devices, which do not divide the 8 of few; near .* 2, 4"),
        ({"data": 16}, 16, "data=16 = 16 devices, and few has 8; give smaller"),
        ({"pipeline": 4}, 9, "= 2 samples of a micro-batch, which do not divide batch_size=9"),
        ({"pipeline": 4, "num_microbatches": 3}, 8, "= 6 samples, and batch_size=8"),
        ({"pipeline": 4}, None, "micro-batches is not known; give num_microbatches= or batch"),
        ({"pipeline": 2, "virtual": 3}, 8, "= 6 stages, which do not divide the 8 rep.*: 4, 8"),
        ({"partition": (3, 4)}, 8, r"has 2 stages of \[3, 4\] layers; give the 8 layers"),
        ({"partition": "tx"}, 8, "has 'x'; Megatron's layout has E for"),
        ({"partition": "ttt"}, 8, "has 3 layers t, and the model repeats 8"),
        ({"expert": 3}, 8, "expert=3 does not divide the 8 devices along data; near .*: 2, 4"),
        ({"tensor": 2, "zero": 2}, 8, "zero=2 with tensor=2"),
        ({"tensor": 2, "expert": 2}, 8, "expert=2 with tensor=2"),
        ({"sequence": True}, 8, "sequence=True with tensor=1"),
        ({"context": 2, "tensor": 2}, 8, "context=2 with tensor=2 and sequence=False"),
        ({"context": 2, "expert": 2}, 8, "context=2 with expert=2"),
        ({"context": 2, "zero": 3}, 8, "context=2 with zero=3"),
        ({"context": 3}, 8, "context=3 = 3 devices, which do not divide the 8 of few"),
        ({"virtual": 2}, 8, "virtual=2 with pipeline=1"),
        ({"zero": 4}, 8, "zero=4; give 0, 1, 2 or 3"),
        ({"tensor": 0}, 8, "tensor=0"),
        ({"recompute": "some"}, 8, "recompute='some'"),
        ({"recompute_num_layers": 0, "recompute": "layers"}, 8, "recompute_num_layers=0"),
        ({"recompute_num_layers": 1}, 8, "recompute_num_layers=1 with recompute='never'"),
    ],
)
def test_what_does_not_divide_names_what_is_near(
    options: dict[str, Any], batch_size: int | None, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        penstock.simulate(counted(8), cluster(4, 4), Parallelism(**options), batch_size=batch_size)


@pytest.mark.parametrize(("heads", "num_kv_heads"), [(6, 6), (8, 2)])
def test_heads_that_do_not_divide_are_refused(heads: int, num_kv_heads: int) -> None:
    model, inputs = nn.Sequential(attending(heads, num_kv_heads)), torch.empty(2, 4, 48)
    layout = Parallelism(tensor=4, num_microbatches=1)
    few = min(heads if heads % 4 else num_kv_heads, num_kv_heads)
    with pytest.raises(ConfigError, match=f"does not divide the {few} heads of layer '0'; near"):
        penstock.simulate(model, cluster(4), layout, example_inputs=inputs.to("meta"))


def test_a_profile_from_a_file_has_no_operators_to_divide() -> None:
    profile = penstock.Profile.from_json(counted(4).to_json())
    with pytest.raises(ConfigError, match="nobody knows the operators of model"):
        penstock.simulate(profile, cluster(4), Parallelism(num_microbatches=1))


def test_what_crosses_costs_what_the_way_to_the_next_devices_costs() -> None:
    """Two stages in one host, of a cluster with a slow network that nothing crosses."""
    profile, layout = counted(8), Parallelism(pipeline=2, data=1, num_microbatches=4)
    slow, fast = (
        penstock.simulate(profile, cluster(2, 2, near=1e9, far=far), layout) for far in (1e3, 1e12)
    )
    assert slow.step_s == fast.step_s
    far = Parallelism(pipeline=4, data=1, num_microbatches=4)
    steps_s = [
        penstock.simulate(profile, cluster(2, 2, near=1e9, far=rate), far).step_s
        for rate in (1e3, 1e12)
    ]
    assert steps_s[0] > 2 * steps_s[1]


def test_sums_of_gradients_are_exposed_where_no_work_is_left_to_hide_them() -> None:
    """Rank 1 ends a backward of stage 0 before the step does: of its sum, that much is hidden."""
    profile, layout = counted(8), Parallelism(pipeline=2, data=2, num_microbatches=4)
    free, paid = (penstock.simulate(profile, cluster(4, near=x), layout) for x in (1e18, 1e10))
    plan = penstock.plan(profile, cluster(4, near=1e10), parallelism=layout)
    assert plan.predicted_stages is not None
    sums = [span for span in paid.spans if span.instruction == ReduceGradients(span.rank)]
    assert [span.duration_s > 0 for span in sums] == [True, True]
    assert all(span.duration_s < 1e-9 for span in free.spans if "G" in str(span.instruction))
    num_bytes = 4 * (64 * 64 + 64) * 4  # of half the layers, of which each device sends all once
    exposed_s = sums[0].duration_s
    assert exposed_s == pytest.approx(num_bytes / 1e10, rel=0.01)
    later_s = plan.predicted_stages[0].backward_s + plan.predicted_stages[0].handover_s / 2
    assert sums[1].duration_s == pytest.approx(exposed_s, rel=0.01)
    assert sums[0].start_s - sums[1].start_s == pytest.approx(later_s, rel=0.01)


def test_memory_of_mixed_precision_is_megatrons_formula() -> None:
    """A weight in bfloat16, its gradient in float32, and the optimizer's 12 bytes divided by d."""
    with torch.device("meta"):
        layers = [nn.Linear(512, 512, bias=False).bfloat16() for _ in range(4)]
        inputs = torch.empty(8, 512, dtype=torch.bfloat16)
    profile = penstock.profile(
        layers,
        inputs,
        measure=False,
        gradient_dtype="float32",
        optimizer=lambda weights: penstock.MainWeights(torch.optim.AdamW, weights),
    )
    layout = Parallelism(data=4, pipeline=2, zero=1, microbatch_size=2, num_microbatches=2)
    hosts = cluster(8, flops_per_s={"bfloat16": 1e11})
    kinds = penstock.simulate(profile, hosts, layout).peak_bytes_by_kind()
    sums = {kind: of_ranks[0] / (2 * 512 * 512) for kind, of_ranks in kinds.items()}
    assert sums[MemoryKind.WEIGHTS] == 2 + 2 / 4  # the slice between steps lies beside the whole
    assert sums[MemoryKind.GRADIENTS] == 4
    assert sums[MemoryKind.OPTIMIZER] == pytest.approx(12 / 4, rel=1e-4)  # and counters
    # stage 0 keeps two micro-batches of 2 samples: what enters each of its two layers
    assert kinds[MemoryKind.ACTIVATIONS] == (2 * 2 * 2 * 512 * 2, 1 * 2 * 2 * 512 * 2)
