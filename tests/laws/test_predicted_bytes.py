"""What a stage keeps is predicted to the byte, and at most what the paper's formula says."""

from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import penstock
from benchmarks.all_pairs import all_pairs
from benchmarks.blocks import conv_net, transformer
from penstock import Pipeline, Profile, Recompute, Trace, Transport, capture
from penstock.planner.predict import Prediction
from penstock.schedules import Backward, BackwardInput, Family, Schedule, gpipe, one_f_one_b
from penstock.trace import MemoryKind
from penstock_recipes.zoo import amoebanet_d
from penstock_recipes.zoo.resnet import residual_network
from tests.every_schedule import EVERY_SCHEDULE, families
from tests.memory_formula import cut, formula_bytes, most_kept
from tests.profiles import cluster
from tests.ways import WHOLE_STAGES

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
    options: dict[str, Any] = {"num_microbatches": NUM_MICROBATCHES, "loss": loss}
    options |= {"schedule": family, "recompute": recompute, "transport": Transport.LOOPBACK}
    options |= {"trace": Trace.MEMORY}
    with Pipeline(
        layers, partition=[least + (stage < more) for stage in range(num_stages)], **options
    ) as pipe:
        for _ in range(2):  # the first step copies each input, to see who changes it in place
            pipe.train_step(x, y)
        told = Prediction(pipe.plan, profiled(name), cluster(num_stages), len(x))
        assert pipe.last_timeline is not None
        found, measured = told.timeline.peak_bytes(), pipe.last_timeline.peak_bytes()
        of_kind, held = (t.peak_bytes_by_kind() for t in (told.timeline, pipe.last_timeline))
        for kind in (MemoryKind.WEIGHTS, MemoryKind.GRADIENTS):
            assert of_kind[kind] == held[kind]
        for stage in range(num_stages):
            kinds = {type(x) for x in told.schedule.instructions if x.stage == stage}
            if stage in pipe.plan.by_layers and kinds >= {Backward, BackwardInput}:
                assert found[stage] >= measured[stage]  # all backwards count as divided ones
            else:
                assert found[stage] == measured[stage]


@pytest.mark.parametrize("num_stages", (1, 2, 4))
def test_the_peak_of_every_stage_is_predicted(num_stages: int) -> None:
    """Models and policies take turns, so that any two of them meet."""
    for n, family in enumerate(FAMILIES):
        if num_stages % family.stages_per_rank == 0:
            name = ("transformer", "convolutions", "dropout")[(n + num_stages) % 3]
            check(name, num_stages, family, POLICIES[(n // 3 + num_stages) % 3])


@pytest.mark.slow
@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param(policy, marks=[pytest.mark.slow] if policy is not Recompute.STAGE else [])
        for policy in POLICIES
    ],
    ids=lambda policy: policy.name,
)
def test_the_peak_of_a_captured_model_with_skips_is_predicted(recompute: Any) -> None:
    for family in (FAMILIES[3],) if recompute is Recompute.STAGE else (FAMILIES[0], FAMILIES[3]):
        check("amoebanet", 2, family, recompute)


@pytest.mark.parametrize("stage", range(4))
def test_gpipe_keeps_m_micro_batches_and_1f1b_those_on_their_way(stage: int) -> None:
    def most_live(schedule: Schedule) -> float:
        return most_kept(schedule, stage, [1] * 8, kept=1, passing=0)

    assert most_live(gpipe(4, 8)) == 8 and most_live(one_f_one_b(4, 8)) == 4 - stage


def divides(family: Family) -> bool:
    """Tell whether a backward is in two parts: the formula knows of whole ones only."""
    made = chain.from_iterable(family(num_stages, 4).instructions for num_stages in (1, 2, 3))
    return any(isinstance(x, BackwardInput) for x in made)


@pytest.mark.parametrize(
    "partition, recompute, schedule",
    all_pairs(
        [
            ([8], [3, 5], [2, 1, 5]),
            WHOLE_STAGES,
            [family for family in EVERY_SCHEDULE if not divides(family)],
        ]
    ),
    ids=str,
)
def test_a_pipeline_keeps_what_the_formula_says(partition, recompute, schedule) -> None:
    torch.manual_seed(0)
    model = residual_network(1, 4)
    inputs, targets = torch.rand(24, 1, 8, 8), torch.randint(10, (24,))
    options: dict[str, Any] = {"loss": cross_entropy, "schedule": schedule, "recompute": recompute}
    with penstock.Pipeline(model, partition=partition, num_microbatches=4, **options) as pipe:
        pipe.train_step(inputs, targets)  # the first step looks for layers that change their input
        pipe.trace = penstock.Trace.MEMORY
        pipe.train_step(inputs, targets)
        assert pipe.last_timeline is not None
        measured = pipe.last_timeline.peak_bytes()
        expected = formula_bytes(
            list(cut(model, pipe.partition)),
            (inputs, targets),
            cross_entropy,
            pipe.schedule_for(),
            recompute,
        )
    assert measured == pytest.approx(expected, rel=0.01)


def test_the_formula_by_hand() -> None:
    """Stage 0 keeps 3 batches of 2 x 4 floats, and the Tanh's output of 2 x 5 floats."""
    stages = [nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Sequential(nn.Linear(5, 1))]
    inputs, targets = torch.randn(6, 4), torch.randn(6, 1)
    schedule, recompute = gpipe(2, 3), penstock.Recompute.STAGE
    found = formula_bytes(stages, (inputs, targets), nn.functional.mse_loss, schedule, recompute)
    assert found[0] == 3 * (2 * 4 * 4) + 2 * 5 * 4
    assert found[1] == 3 * (2 * 5 * 4 + 2 * 4) + 2 * 4  # mse_loss saves the Linear's output


def test_working_it_out_changes_nothing() -> None:
    model = residual_network(1, 4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch = (torch.rand(6, 1, 8, 8), torch.randint(10, (6,)))
    generator = torch.random.get_rng_state()
    formula_bytes([model], batch, cross_entropy, gpipe(1, 4), penstock.Recompute.STAGE)
    assert torch.equal(generator, torch.random.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
