"""Plans of stages on one device each and of stages on several are compared by one measure."""

from functools import cache
from itertools import pairwise
from random import Random

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import PlanError
from penstock.planner.candidates import Constraints
from penstock.planner.make_plan import plan_profile
from tests.few_devices import cluster

SAME = 1.01


@cache
def drawn(seed: int) -> tuple[penstock.Profile, penstock.Cluster]:
    """Draw a chain of layers, counted, and a cluster."""
    random = Random(seed)
    widths = [random.choice((16, 64, 256)) for _ in range(random.randint(3, 6))]
    with torch.device("meta"):
        layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
        inputs = torch.empty(16, widths[0])
    hosts = random.choice(((2,), (4,), (2, 2), (1, 3)))
    speeds = {"near": random.choice((1e9, 1e11)), "far": random.choice((1e8, 1e11))}
    where = cluster(*hosts, **speeds, torch_type="cuda")
    return penstock.profile(layers, inputs, measure=False, microbatch_sizes=[1, 4, 16]), where


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_the_plan_is_no_slower_than_the_best_of_either_kind(seed: int) -> None:
    profile, where = drawn(seed)
    asked = Constraints(batch_size=16)
    chosen = plan_profile(profile, where, 16, constraints=asked).plan
    alone = plan_profile(profile, where, 16, constraints=asked, sharding=None).plan
    steps_s = [alone.predicted_step_s or 0.0]
    for sharding in ("auto", "zero1"):
        try:
            on_meshes = plan_profile(profile, where, 16, constraints=asked, sharding=(sharding,))
        except PlanError:
            continue
        steps_s.append(on_meshes.plan.predicted_step_s or 0.0)
    assert 0 < (chosen.predicted_step_s or 0.0) <= SAME * min(steps_s)


def test_operators_take_the_seconds_of_the_profile() -> None:
    profile, where = drawn(0)
    asked = Constraints(batch_size=16, num_microbatches=4)
    alone = plan_profile(profile, where, 16, constraints=asked, sharding=None).plan
    megatron = plan_profile(profile, where, 16, constraints=asked, sharding="megatron").plan
    assert len(megatron.layer_factors) == len(profile.layers)
    assert alone.layer_factors == () and min(megatron.layer_factors) > 0
