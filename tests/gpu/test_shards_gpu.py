"""Two processes that divide a model's operators on one GPU train as the unsplit model does."""

from pathlib import Path

import pytest
import torch

from tests.distributed.launch import run
from tests.gpu import shards_job
from tests.gpu.models import language, unlike

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cuda:0"])
def test_shards_on_one_gpu_train_as_the_unsplit_model(device: str, tmp_path: Path) -> None:
    run(2, [str(Path(shards_job.__file__)), str(tmp_path), device])
    each = [torch.load(tmp_path / f"{rank}.pt", map_location="cpu") for rank in range(2)]
    wanted = [
        shards_job.train(language(device, dropout), num_stages=1, devices=device)
        for _, dropout in shards_job.WAYS
    ]
    bad = [
        (way, rank, names)
        for rank, found in enumerate(each)
        for way, own, one in zip(shards_job.WAYS, found, wanted, strict=True)
        if (names := unlike(own, one, 1e-10))
    ]
    assert bad == []
