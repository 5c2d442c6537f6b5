"""Gradients of several steps add up in processes as they do in threads."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.schedules import ALL_SCHEDULES
from penstock.types import Recompute, Reduction
from tests.distributed import accumulation_job
from tests.distributed.call import call
from tests.side_by_side import same_bits

WAYS = [
    {"schedule": schedule.name, "recompute": recompute.value, "reduction": reduction.value}
    for schedule, recompute, reduction in product(ALL_SCHEDULES, Recompute, Reduction)
]


@pytest.mark.parametrize(
    ("stages", "replicas"), ((2, 1), (1, 2), pytest.param(3, 1, marks=pytest.mark.slow))
)
def test_three_steps_add_up_to_one_of_three_times_the_micro_batches(
    stages: int, replicas: int, tmp_path: Path
) -> None:
    by_rank = call(accumulation_job.work, (stages, replicas), tmp_path, ways=WAYS)
    names = {name for found in by_rank for name in found[0][0]}
    assert names == {f"{n}.{kind}" for n in (0, 2, 3) for kind in ("weight", "bias")}
    for found in by_rank:
        for way, (by_parts, evaluated, at_once) in zip(WAYS, found, strict=True):
            for name, gradient in by_parts.items():
                assert same_bits(gradient, evaluated[name]), f"{way}: {name}"
                check_sum(way, gradient, at_once[name], exact=replicas == 1)


def check_sum(way: dict[str, Any], by_parts: Tensor, at_once: Tensor, *, exact: bool) -> None:
    """See that gradients of parts add up; not `exact`: replicas added up each step's by itself."""
    times = 3 if way["reduction"] == "mean" else 1
    if exact and times == 1:
        assert same_bits(by_parts, at_once), way
    torch.testing.assert_close(by_parts / times, at_once, rtol=1e-5, atol=1e-6)
