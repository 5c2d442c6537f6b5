"""A summary adds up, and takes neither memory nor anything of the model's state."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.zoo import Summary, bottleneck_resnet, summary, unet, wide_resnet


def by_name(found: Summary) -> dict[str, Any]:
    return {row.name: row for row in found.rows}


def test_the_table_of_a_sequential() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1000))
    lines = str(summary(model, torch.zeros(2, 3, 4, 4))).splitlines()
    assert lines == [
        "layer  module      output        parameters   FLOPs",
        "---------------------------------------------------",
        "0      Conv2d      (2, 4, 2, 2)         112   1,728",
        "1      ReLU        (2, 4, 2, 2)           0       0",
        "2      Flatten     (2, 16)                0       0",
        "3      Linear      (2, 1000)         17,000  64,000",
        "---------------------------------------------------",
        "total  Sequential                    17,112  65,728",
    ]


def test_without_inputs_there_are_parameters_only() -> None:
    found = summary(unet(depth=1, width=4))
    assert found.flops is None and found.parameters == sum(row.parameters for row in found.rows)
    assert all(row.output is None and row.flops is None for row in found.rows)
    assert [row.name for row in found.rows] == ["encoder.0", "bottom", "decoder.0", "head"]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_layers_of_each_level_add_up(depth: int) -> None:
    model = bottleneck_resnet((1, 1), 4)
    found = summary(model, torch.zeros(2, 3, 32, 32), depth=depth)
    assert max(row.level for row in found.rows) == depth
    top = [row for row in found.rows if row.level == 1]
    assert sum(row.parameters for row in top) == found.parameters
    assert sum(row.flops or 0 for row in top) == found.flops
    below = [row for row in found.rows if row.name.startswith("block0.") and row.level == 2]
    if below:
        block = by_name(found)["block0"]
        assert block.parameters == sum(row.parameters for row in below)
        assert block.flops == sum(row.flops or 0 for row in below)


def test_resnet_50_has_the_flops_that_are_published() -> None:
    """4.09 billion multiply-adds (torchvision's table of its models), counted as two each."""
    with torch.device("meta"):
        model = bottleneck_resnet()
    found = summary(model, torch.empty(1, 3, 224, 224, device="meta"))
    assert found.flops == pytest.approx(2 * 4.09e9, rel=1e-3)


def test_a_model_larger_than_the_memory_is_summarised() -> None:
    with torch.device("meta"):
        model = wide_resnet("13B")
    found = summary(model, torch.empty(1520, 3, 224, 224, device="meta"))
    assert found.parameters == 12_633_386_944
    assert by_name(found)["head"].output == (1520, 1024)
    assert all(p.is_meta for p in model.parameters())


class Structured(nn.Module):
    """Mappings and tuples in and out, a weight of its own, a constant, one layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(4, 4)
        self.pairs = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 3)})
        self.unused = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.ones(4))
        self.constant = torch.ones(4)

    def forward(self, x: Tensor, *, others: dict[str, Tensor]) -> dict[str, Any]:
        x = self.twice(self.twice(x * self.scale + self.constant) + others["y"])
        own = x @ x.T
        return {"pair": (self.pairs["a"](x), self.pairs["b"](x)), "own": own, "none": None}


def test_mappings_in_and_out_shared_calls_and_what_the_model_does_itself() -> None:
    model = Structured()
    found = summary(model, {"x": torch.zeros(5, 4), "others": {"y": torch.zeros(5, 4)}})
    rows = by_name(found)
    assert list(rows) == ["twice", "pairs.a", "pairs.b", "unused", "(own)"]
    assert (rows["twice"].calls, rows["twice"].flops) == (2, 2 * 2 * 5 * 4 * 4)
    assert (rows["unused"].calls, rows["unused"].flops, rows["unused"].output) == (0, 0, None)
    assert (rows["(own)"].parameters, rows["(own)"].flops) == (4, 2 * 5 * 4 * 5)
    assert found.flops == sum(row.flops or 0 for row in found.rows)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, first: Tensor, second: Tensor) -> Any:
        return self.inner(first, others={"y": second})


def test_positional_inputs_and_structured_outputs() -> None:
    found = summary(Wrapped(Structured()), (torch.zeros(5, 4), torch.zeros(5, 4)))
    (row,) = found.rows
    assert row.output == {"pair": [(5, 2), (5, 3)], "own": (5, 5), "none": "NoneType"}
    assert "{pair: [(5, 2), (5, 3)], own: (5, 5), none: NoneType}" in str(found)


def test_a_layer_called_inside_another_counts_once_in_the_total() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Sequential(shared, nn.ReLU()))
    found = summary(model, torch.zeros(5, 4))
    assert found.flops == 2 * 2 * 5 * 4 * 4
    assert [row.flops for row in found.rows] == [found.flops, found.flops // 2]


def test_a_shared_weight_counts_in_the_first_layer_that_has_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    found = summary(model, torch.zeros(5, 4))
    assert [row.parameters for row in found.rows] == [16, 0] and found.parameters == 16


def test_frozen_parameters_are_counted_apart() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    found = summary(model)
    assert (found.parameters, found.trainable_parameters) == (40, 20)


@pytest.mark.parametrize("training", [True, False])
def test_attention_and_recurrent_layers_are_counted(training: bool) -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).train(training)
    rows = by_name(summary(encoder, torch.zeros(2, 3, 8)))
    projections, products = 2 * (2 * 3 * 8) * (4 * 8), 2 * (2 * 3 * 3 * 8) * 2
    assert rows["self_attn"].flops == projections + products
    lstm = nn.LSTM(4, 5, batch_first=True).train(training)
    assert summary(lstm, torch.zeros(2, 3, 4)).flops == 2 * (2 * 3) * (4 + 5) * 20


def test_values_buffers_modes_and_random_numbers_stay_as_they_are() -> None:
    model = unet(depth=1, width=4, dropout=0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    settings = torch.backends.mkldnn.enabled, torch.backends.mha.get_fastpath_enabled()
    summary(model, torch.zeros(2, 3, 8, 8))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert settings == (torch.backends.mkldnn.enabled, torch.backends.mha.get_fastpath_enabled())
    assert model.training and not any(part._forward_hooks for part in model.modules())


def test_it_can_be_read_by_machines() -> None:
    found = summary(nn.Sequential(nn.Linear(4, 3)), torch.zeros(5, 4))
    assert json.loads(found.to_json()) == {
        "model": "Sequential",
        "rows": [
            {
                "name": "0",
                "module": "Linear",
                "level": 1,
                "calls": 1,
                "output": [5, 3],
                "parameters": 15,
                "flops": 120,
            }
        ],
        "parameters": 15,
        "trainable_parameters": 15,
        "flops": 120,
    }


class Choosing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_a_model_whose_way_depends_on_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="the forward of Choosing depends on values"):
        summary(Choosing(), torch.zeros(3))


def test_a_depth_below_1_is_refused() -> None:
    with pytest.raises(ConfigError, match="depth=0: give an integer from 1 up"):
        summary(nn.Linear(1, 1), depth=0)
