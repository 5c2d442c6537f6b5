"""A pipeline that is used as a model of another library: one line says what to use instead."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import penstock
from penstock.errors import BatchError, CheckpointError, ConfigError, RouteError

X = torch.randn(4, 3)


class Scored(nn.Module):
    """A model that computes a loss from its labels; takes and ignores other keywords."""

    config = "tiny"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None, **more: Tensor) -> dict[str, Any]:
        y = self.second(self.first(x))
        y = y + sum(value.sum() for value in more.values())
        return {"loss": None if labels is None else (y - labels).square().mean(), "y": y}


BATCH: dict[str, Any] = {"x": X, "labels": torch.zeros(4, 2)}


@pytest.fixture
def pipe() -> Iterator[penstock.Pipeline]:
    options: dict[str, Any] = {"partition": [1, 1], "num_microbatches": 2}
    with penstock.Pipeline(Scored(), example_inputs=BATCH, **options) as made:
        yield made


def test_a_step_takes_a_batch_as_keywords(pipe: penstock.Pipeline) -> None:
    loss = pipe.train_step(**BATCH)
    first = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
    pipe.zero_grad()
    assert torch.equal(loss, pipe.train_step(BATCH)) and len(first) == 4
    for name, parameter in pipe.named_parameters():
        assert torch.equal(first[name], parameter.grad)  # type: ignore[arg-type]  # there is one


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("generate", "no attribute 'generate': a pipeline trains and evaluates; penstock.save_p"),
        ("save_pretrained", r"penstock\.save_pretrained\(pipe, folder\) writes the whole model"),
        ("device", r"each stage has one: pipe\.devices"),
        ("no_sync", "give more micro-batches instead"),
        ("config", r"the model that was captured has one: pipe\.original\.config"),
        ("unknown", "no attribute 'unknown'$"),
    ],
)
def test_names_of_other_libraries(pipe: penstock.Pipeline, name: str, message: str) -> None:
    assert not hasattr(pipe, name)
    with pytest.raises(AttributeError, match=message):
        getattr(pipe, name)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_wrappers_of_torch_are_refused(pipe: penstock.Pipeline) -> None:
    with pytest.raises(ConfigError, match=r"DistributedDataParallel around .*num_replicas=\.\.\."):
        nn.parallel.DistributedDataParallel(pipe)
    pipe.train_step(**BATCH)
    with pytest.raises(ConfigError, match=r"fully_shard around a pipeline .*sharding=\"zero3\""):
        fully_shard(pipe)
    assert type(pipe) is penstock.Pipeline


def test_batches_of_another_form(pipe: penstock.Pipeline) -> None:
    with pytest.raises(BatchError, match=r"a list of mappings .* \(x, labels\).*takes one mini-b"):
        pipe.train_step([BATCH, BATCH])
    with pytest.raises(RouteError, match=r"needs the input 'label' .* Is its name right"):
        pipe.train_step(x=X, label=X)
    with pytest.raises(ConfigError, match=r"has no loss\. Give the labels"):
        pipe.train_step(x=X)


def test_a_name_of_the_hub_is_no_folder() -> None:
    with pytest.raises(CheckpointError, match=r"tiny does not exist; .* of the Hugging Face hub"):
        penstock.Pipeline([nn.Linear(2, 2)], 1, weights="example/tiny")
