"""Without replicas a sharded optimizer is the plain one."""

from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import ConfigError
from penstock.optim.zero import is_sharded, share_of


def pipeline(*layers: nn.Module) -> penstock.Pipeline:
    return penstock.Pipeline(list(layers), num_stages=1, loss=nn.MSELoss())


def test_one_process_gets_the_plain_optimizer() -> None:
    pipe = pipeline(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = penstock.zero_optimizer(pipe, torch.optim.AdamW, lr=0.5)
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.param_groups[0]["params"] == list(pipe.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not is_sharded(optimizer)
    assert share_of(optimizer) is optimizer


def test_a_pipeline_without_parameters_gets_an_optimizer_too() -> None:
    optimizer = penstock.zero_optimizer(pipeline(nn.Tanh()), torch.optim.AdamW)
    optimizer.step()
    assert optimizer.param_groups[0]["params"] == []


def test_groups_are_taken_as_torch_takes_them() -> None:
    pipe = pipeline(nn.Linear(2, 3), nn.Linear(3, 2))
    first, *rest = pipe.parameters()
    groups: list[dict[str, Any]] = [{"params": first, "lr": 0.5}, {"params": iter(rest)}]
    optimizer = penstock.zero_optimizer(pipe, torch.optim.SGD, groups, lr=0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert [group["params"] for group in optimizer.param_groups] == [[first], rest]


def test_what_is_no_parameter_is_refused() -> None:
    pipe = pipeline(nn.Linear(2, 3))
    named: Any = pipe.named_parameters()
    with pytest.raises(ConfigError, match=r"params hold a tuple; give parameters"):
        penstock.zero_optimizer(pipe, torch.optim.SGD, named)
