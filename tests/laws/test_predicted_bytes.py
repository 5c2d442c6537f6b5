"""What a stage keeps is predicted to the byte, from a profile that has seen no pipeline."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import penstock
from benchmarks.blocks import conv_net, transformer
from penstock import Pipeline, Profile, Recompute, Trace, Transport, capture
from penstock.planner.predict import Prediction
from penstock.schedules import Family
from penstock.schedules.ir import Backward, BackwardInput
from penstock_recipes.zoo import amoebanet_d
from tests.every_schedule import families
from tests.profiles import cluster

NUM_MICROBATCHES, SAMPLES = 4, 2
FAMILIES = [family for per_rank in (1, 2) for family in families(per_rank)]
POLICIES = (Recompute.NEVER, Recompute.STAGE, Recompute.layers(0, 2, 3))


def both_heads(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    main, auxiliary = (cross_entropy(output, labels) for output in outputs)
    return main + 0.4 * auxiliary


@cache
def subject(name: str) -> tuple[Any, Any, Tensor, Tensor]:
    """Return layers, a loss, and a batch of all micro-batches with its targets."""
    count = NUM_MICROBATCHES * SAMPLES
    images = torch.randn(count, 3, 32, 32)
    match name:
        case "transformer":
            x, y = torch.randn(2, count, 6, 8)
            return transformer(4, 8, 2), mse_loss, x[:, :-1], y[:, 1:]
        case "convolutions":
            return conv_net(6, 4), mse_loss, images, torch.randn(count, 4, 32, 32)
        case "dropout":
            layers = [nn.Linear(6, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 3)]
            return layers, cross_entropy, torch.randn(count, 6), torch.randint(3, (count,))
    model = capture(amoebanet_d(3, 16, num_classes=4, image_size=32), images)
    return model, both_heads, images, torch.randint(4, (count,))


@cache
def profiled(name: str) -> Profile:
    layers, loss, x, y = subject(name)
    one = x[:SAMPLES], y[:SAMPLES]
    return penstock.profile(
        layers, one[0], loss=loss, targets=one[1], measure=False, torch_type="cpu"
    )


def check(name: str, num_stages: int, family: Family, recompute: Any) -> None:
    layers, loss, x, y = subject(name)
    least, more = divmod(len(profiled(name).layers), num_stages)
    with Pipeline(
        layers,
        partition=[least + (stage < more) for stage in range(num_stages)],
        num_microbatches=NUM_MICROBATCHES,
        loss=loss,
        schedule=family,
        recompute=recompute,
        transport=Transport.LOOPBACK,
        trace=Trace.MEMORY,
    ) as pipe:
        for _ in range(2):  # the first step copies each input, to see who changes it in place
            pipe.train_step(x, y)
        told = Prediction(pipe.plan, profiled(name), cluster(num_stages), len(x))
        assert pipe.last_timeline is not None
        found, measured = told.timeline.peak_bytes(), pipe.last_timeline.peak_bytes()
        for stage in range(num_stages):
            kinds = {type(x) for x in told.schedule.instructions if x.stage == stage}
            if stage in pipe.plan.by_layers and kinds >= {Backward, BackwardInput}:
                assert found[stage] >= measured[stage]  # all backwards count as divided ones
            else:
                assert found[stage] == measured[stage]


@pytest.mark.parametrize("num_stages", (1, 2, 4))
@pytest.mark.parametrize("name", ("transformer", "convolutions", "dropout"))
def test_the_peak_of_every_stage_is_predicted(name: str, num_stages: int) -> None:
    for n, family in enumerate(FAMILIES):
        if num_stages % family.stages_per_rank == 0:
            check(name, num_stages, family, POLICIES[(n + num_stages) % 3])


@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param(policy, marks=[pytest.mark.slow] if policy is not Recompute.STAGE else [])
        for policy in POLICIES
    ],
    ids=lambda policy: policy.name,
)
def test_the_peak_of_a_captured_model_with_skips_is_predicted(recompute: Any) -> None:
    for family in (FAMILIES[0], FAMILIES[3]):
        check("amoebanet", 2, family, recompute)
