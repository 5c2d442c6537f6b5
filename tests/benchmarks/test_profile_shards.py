"""One device's part of a divided model is measured as its process runs and holds it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.foresight.profile_shards import profile_shards
from penstock import Cluster, Mesh, Pipeline, Plan, Recompute, Trace, Transport
from penstock.costs.cluster import Device, Host, Link
from penstock.errors import ConfigError
from penstock.model.capture.capture import resolve_layers
from penstock.planner.placement import Placement
from penstock.planner.predict import Prediction
from penstock.runtime.planning import facts_of
from penstock.schedules import one_f_one_b
from penstock.torch_private import storage_id
from penstock_recipes.zoo import gpt
from tests.distributed.call import call

WORDS = torch.randint(0, 32, (8, 8), generator=torch.Generator().manual_seed(0))
TARGETS = WORDS.roll(-1, 1)
ALPHA_S = 10.0
TWO = (((0, 1),),)
UNLIKE = (((0,),), ((1, 2),))
FOUR = (((0, 1),), ((2, 3),))


def model() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_layers": 2, "width": 16, "num_heads": 4, "num_words": 32}
    return gpt(**sizes, max_length=8, dropout=0.0, tied=False)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def cluster() -> Cluster:
    """A host whose messages take for ever, so that seconds count them."""
    core = Device(name="core", flops_per_s={"float32": 1e9}, bytes_per_s=1e9, memory_bytes=1 << 30)
    host = Host(name="here", devices=("core",) * 4, port="loopback")
    link = Link(bytes_per_s=1e12, latency_s=ALPHA_S)
    return Cluster(name="here", devices={"core": core}, hosts=(host,), links={"loopback": link})


def planned(ranks: Any, sharding: str | None) -> Plan:
    layers = resolve_layers(model(), WORDS)
    num_layers, num_stages = len(layers), len(ranks)
    partition = (num_layers,) if num_stages == 1 else (2, num_layers - 2)
    return Plan(
        layers=tuple(facts_of(layers)),
        partition=partition,
        schedule=one_f_one_b,
        num_microbatches=2,
        recompute=(Recompute.NEVER,) * num_stages,
        placement=Placement(ranks, ("cpu",) * num_stages),
        transport=Transport.TORCH_DISTRIBUTED,
        batch_size=len(WORDS),
        sharding=sharding,
        cluster=cluster(),
    )


def predicted(plan: Plan) -> Prediction:
    """Predict a step from a profile, which leaves the model as it was."""
    own = model()
    profile = profile_shards(own, WORDS, plan, cluster(), loss=loss, targets=TARGETS)
    pairs = zip(own.parameters(), model().parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    return Prediction(plan, profile, cluster())


@pytest.fixture(scope="module")
def megatron() -> Prediction:
    return predicted(planned(TWO, "megatron"))


def test_a_shards_collectives_are_counted_and_priced_by_the_link(megatron: Prediction) -> None:
    """A block of Megatron's has two sums of two devices, forward and backward."""
    sharded = megatron.profile
    block = sharded.sizes[0].seconds(1)
    one_sum_s = 2 * ALPHA_S
    assert round(block.forward_s / one_sum_s, 2) == round(block.backward_s / one_sum_s, 2) == 2
    assert block.weight_s < ALPHA_S
    words = sharded.sizes[0].seconds(0)
    assert words.forward_s + words.backward_s < ALPHA_S  # what others send is not the first one's


def test_parts_of_gradients_are_summed_over_shards_once_a_step(megatron: Prediction) -> None:
    parts = predicted(planned(TWO, "data"))
    assert megatron.costs.reduce_s == (0,)
    assert parts.costs.reduce_s == (pytest.approx(2 * ALPHA_S, rel=1e-3),)
    assert parts.profile.sizes[0].seconds(1).forward_s < ALPHA_S


def test_what_is_not_priced_is_refused() -> None:
    with pytest.raises(ConfigError, match="'zero1' gathers weights once a step"):
        profile_shards(model(), WORDS, planned(TWO, "zero1"), cluster())


def kept(mesh: Mesh, plan: str) -> tuple[dict[int, int], int]:
    pipe = Pipeline(model(), plan=Plan.from_json(plan), mesh=mesh, loss=loss, example_inputs=WORDS)
    optimizer = torch.optim.AdamW(pipe.parameters())
    pipe.train_step(WORDS, TARGETS)  # the first step holds a value longer
    optimizer.zero_grad()
    pipe.trace = Trace.MEMORY
    pipe.train_step(WORDS, TARGETS)
    optimizer.step()
    weights = list(pipe.parameters())
    gradients = (p.grad for p in weights if p.grad is not None)
    states = (x for own in optimizer.state.values() for x in own.values())
    held = {storage_id(t): t.untyped_storage().nbytes() for t in (*weights, *gradients, *states)}
    assert pipe.last_timeline is not None
    return pipe.last_timeline.peak_bytes(), sum(held.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sharding"),
    [
        *((UNLIKE, "data"), (TWO, "megatron")),
        *((TWO, "zero3"), (FOUR, "data")),
    ],
    ids=["1 + 2 data", "2 megatron", "2 zero3", "2 x 2 data"],
)
def test_each_rank_holds_and_keeps_what_is_predicted(ranks, sharding, tmp_path) -> None:
    plan = planned(ranks, sharding)
    told = predicted(plan)
    for rank, (peaks, held) in enumerate(
        call(kept, plan.placement, tmp_path, plan=plan.to_json())
    ):
        (stage,) = plan.placement.stages_of(rank)
        own = told.weights[stage]
        assert held == own.weight_bytes + own.gradient_bytes + own.optimizer_bytes
        assert peaks == {
            n: pytest.approx(b, rel=0.1) for n, b in told.timeline.peak_bytes().items()
        }
