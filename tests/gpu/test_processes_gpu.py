"""On two GPUs: stages in processes give the bits that stages in threads give."""

from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from tests.distributed.launch import run
from tests.gpu.processes_job import gradients, model

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_processes_with_a_gpu_each_give_the_bits_of_threads(tmp_path: Path) -> None:
    run(2, ["-m", "tests.gpu.processes_job", str(tmp_path)])
    found = torch.load(tmp_path / "0.pt") | torch.load(tmp_path / "1.pt")
    with penstock.Pipeline(
        model(), 2, num_microbatches=4, loss=nn.functional.mse_loss, devices=["cuda:0", "cuda:1"]
    ) as pipe:
        expected = gradients(pipe)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
