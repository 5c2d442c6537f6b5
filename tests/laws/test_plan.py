"""A pipeline made of a plan is the pipeline that the plan came from."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Plan, Recompute, TiedGradients, Transport
from penstock.errors import ConfigError, PenstockError, PlanError
from penstock.planner.plan import BalancedBy
from penstock.schedules import gpipe, interleaved_1f1b, one_f_one_b
from tests.side_by_side import same_bits

WAYS: list[dict[str, Any]] = [
    {"partition": [1, 2, 2], "schedule": gpipe, "seed": 3},
    {"num_stages": 2, "schedule": one_f_one_b, "recompute": Recompute.NEVER},
    {"num_stages": 4, "schedule": interleaved_1f1b(2), "transport": Transport.LOOPBACK},
    {"num_stages": 2, "tied_gradients": TiedGradients.SUMMED},
]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    drawing = nn.Tanh(), nn.BatchNorm1d(6), nn.Dropout(0.3)
    return nn.Sequential(nn.Linear(6, 6), *drawing, nn.Linear(6, 3))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def pipeline(model: nn.Module | None = None, **options: Any) -> penstock.Pipeline:
    return penstock.Pipeline(layers() if model is None else model, loss=nn.MSELoss(), **options)


def results(pipe: penstock.Pipeline) -> dict[str, Tensor]:
    with pipe:
        found = {f"loss {step}": pipe.train_step(*batch()) for step in range(2)}
    found |= {f"gradient {n}": p.grad for n, p in pipe.named_parameters() if p.grad is not None}
    return found | pipe.state_dict()


def assert_same(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    assert expected.keys() == found.keys()
    assert [name for name in expected if not same_bits(expected[name], found[name])] == []


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_that_was_written_down_gives_the_same_bits(way: dict[str, Any]) -> None:
    pipe = pipeline(num_microbatches=4, threads_per_stage=1, **way)
    expected = results(pipe)
    again = pipeline(plan=Plan.from_json(pipe.plan.to_json()))
    assert again.plan == pipe.plan and (repr(again), again.seed) == (repr(pipe), pipe.seed)
    assert_same(expected, results(again))
    assert again.plan == pipe.plan


def test_recompute_may_differ_from_stage_to_stage() -> None:
    pipe = pipeline(partition=[2, 1, 2], num_microbatches=4, threads_per_stage=1, schedule=gpipe)
    some = replace(pipe.plan, recompute=(Recompute.STAGE, Recompute.NEVER, Recompute.STAGE))
    mixed = pipeline(plan=some)
    programs = str(mixed.schedule_for()).splitlines()
    assert [f"{stage}R0" in program for stage, program in enumerate(programs)] == [
        True,
        False,
        True,
    ]
    assert_same(results(pipe), results(mixed))


def test_the_first_batch_makes_another_plan() -> None:
    pipe = pipeline(num_stages=2, num_microbatches=4)
    first = pipe.plan
    assert (first.balanced_by, first.predicted_s) == (BalancedBy.PARAMETERS, None)
    outputs, second = pipe(batch()[0]), pipe.plan
    assert (second.balanced_by, len(second.predicted_s or ())) == (BalancedBy.TIME, 2)
    assert replace(second, partition=first.partition, balanced_by=first.balanced_by) == replace(
        first, predicted_s=second.predicted_s, unsplit=()
    )
    outputs.sum().backward()
    results(pipe)
    assert pipe.plan is second
    fixed = pipeline(plan=first)
    results(fixed)
    assert fixed.plan == first


def test_a_backward_of_stages_that_were_cut_anew_is_refused() -> None:
    pipe = pipeline(partition=[2, 3], num_microbatches=4)
    outputs = pipe(batch()[0])
    pipe.double()
    with pytest.raises(PenstockError, match="moved or cut anew"):
        outputs.sum().backward()


def test_arguments_beside_a_plan_are_named() -> None:
    plan = pipeline(num_stages=2).plan
    with pytest.raises(ConfigError, match=r"plan= decides num_stages=, schedule=, seed= already"):
        pipeline(plan=plan, num_stages=2, schedule=gpipe, seed=0)


def test_a_path_is_no_plan() -> None:
    with pytest.raises(PlanError, match=r"plan='plan.json'; it must be a penstock.Plan"):
        pipeline(plan="plan.json")


def test_another_seed_is_another_plan_of_the_same_stages() -> None:
    """It may be chosen while a backward is still to come, as for any later step."""
    pipe = pipeline(num_stages=2, num_microbatches=1, example_inputs=batch()[0])
    first = pipe(batch()[0])
    pipe.seed = 7
    assert pipe.plan == replace(pipe.plan, seed=7)
    first.sum().backward()
    pipe.step = 0
    assert not torch.equal(pipe(batch()[0]), first)


def test_a_plan_of_another_model_names_the_first_layer_that_differs() -> None:
    plan, other = pipeline(num_stages=2).plan, layers()
    other[4] = nn.Linear(6, 4)
    kept = copy.deepcopy(other.state_dict())
    with pytest.raises(PlanError, match=r"another model: the parameters of layer 4, '4' \(Lin"):
        pipeline(other, plan=plan)
    other[2] = nn.LayerNorm(6)
    with pytest.raises(PlanError, match=r"layer 2 is '2' \(BatchNorm1d\) in .* '2' \(LayerNorm\)"):
        pipeline(other, plan=plan)
    with pytest.raises(PlanError, match=r"is in the plan only"):
        pipeline(layers()[:4], plan=plan)
    assert kept["4.weight"].shape == (4, 6)


def test_a_plan_for_what_is_not_here_is_refused() -> None:
    plan = pipeline(num_stages=2).plan
    with pytest.raises(PlanError, match=r"for 2 ranks, and the mesh has 3; make it with init_me"):
        pipeline(plan=plan, mesh=penstock.init_mesh(3))
    for device, words in (("cuda:9", "this process does not have"), ("gpu", "no device")):
        placement = replace(plan.placement, devices=("cpu", device))
        with pytest.raises(PlanError, match=f"stage 1 on .*{words}"):
            pipeline(plan=replace(plan, placement=placement))
