"""On a GPU: a step as one CUDA graph has eager's bits, with dropout and recompute."""

import warnings
from typing import Any

import pytest
import torch

from penstock.schedules import gpipe, interleaved_1f1b, one_f_one_b, zb_h1
from tests.pretend_devices.test_graphs import piped, train, with_dropout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("recompute", ["never", "stage", "layers"])
@pytest.mark.parametrize(
    ("schedule", "num_stages"),
    [(gpipe, 1), (one_f_one_b, 2), (zb_h1(), 4), (interleaved_1f1b(2), 4)],
)
def test_steps_have_eagers_bits(schedule: Any, num_stages: int, recompute: str) -> None:
    how = {"schedule": schedule, "recompute": recompute}
    with piped(with_dropout(), num_stages, **how) as pipe:
        wanted = train(pipe)
    graphed = piped(with_dropout(), num_stages, cuda_graphs=True, **how)
    with graphed as pipe, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(pipe) == wanted
