"""On two GPUs, or on one that two processes share: they give the bits of stages in threads."""

from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from tests.distributed.launch import run
from tests.gpu.processes_job import gradients, model

_SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
"""What lets two NCCL ranks share a GPU, and its multiprocessors."""


def _check_processes(
    folder: Path, devices: list[str], environment: dict[str, str], words: list[str]
) -> None:
    run(2, ["-m", "tests.gpu.processes_job", str(folder), *words], 60.0, environment)
    found = torch.load(folder / "0.pt") | torch.load(folder / "1.pt")
    with penstock.Pipeline(
        model(),
        2,
        num_microbatches=4,
        loss=nn.functional.mse_loss,
        schedule="1f1b",
        devices=devices,
    ) as pipe:
        expected = gradients(pipe)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


_EAGER_OR_GRAPHS = pytest.mark.parametrize("words", ([], ["graphs"]))


@_EAGER_OR_GRAPHS
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_processes_with_a_gpu_each_give_the_bits_of_threads(
    tmp_path: Path, words: list[str]
) -> None:
    _check_processes(tmp_path, ["cuda:0", "cuda:1"], {}, words)


@_EAGER_OR_GRAPHS
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
def test_two_processes_on_one_gpu_give_the_bits_of_threads(
    tmp_path: Path, words: list[str]
) -> None:
    if (version := torch.cuda.nccl.version()) < (2, 30):
        pytest.skip(f"NCCL {version} refuses two ranks on a GPU; 2.30 and later allow them")
    environment = {**_SHARED, "CUDA_VISIBLE_DEVICES": "0"}
    _check_processes(tmp_path, ["cuda:0"] * 2, environment, words)
