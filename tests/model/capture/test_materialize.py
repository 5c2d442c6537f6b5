"""Captured models built on the meta device get values: the library's, whatever the cut."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.model.capture.captured import record_model
from penstock.model.capture.source import captured_layers
from penstock.model.layers import Layers
from tests.model.capture.any_models.lists import REQUIRED
from tests.model.capture.running import assert_equal, captured_of, random_cut
from tests.pretrained import build, layers_of, pipeline

CPU = torch.device("cpu")
FEW = ["llama, tied", "resnet"]
UNLIKE = {
    "branching",  # looks at values, and so has to be captured with them
    "clip",  # transformers leaves its logit_scale to the constructor
}
NAMES = [
    pytest.param(m.name, marks=() if m.name in FEW else pytest.mark.slow)
    for m in REQUIRED
    if m.name not in UNLIKE
]


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Give everything that has values, non-persistent buffers too."""
    everything = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in everything if not tensor.is_meta}


def model_of(layers: Layers) -> nn.Module:
    return captured_of(layers).model


def made_stages(layers: Layers, partition: list[int], stages: list[int]) -> None:
    """Make what the given stages have, and forget the rest."""
    plans = layers.plan_stages(tuple(partition))
    layers.place([(plans[stage], CPU) for stage in stages], 3, draws=True)


@pytest.mark.parametrize("name", NAMES)
def test_values_do_not_depend_on_the_cut_nor_on_what_is_elsewhere(name: str) -> None:
    whole = layers_of(build(name, device="meta"))
    made_stages(whole, [len(whole)], [0])
    expected = tensors(model_of(whole))
    assert len(expected) == len([*model_of(whole).parameters()]) + len(
        [*model_of(whole).buffers()]
    )
    found: dict[str, Tensor] = {}
    for stage in range(3):
        layers = layers_of(build(name, device="meta"))
        made_stages(layers, random_cut(len(layers), 3), [stage])
        mine = tensors(model_of(layers))
        assert_equal(mine, {name: expected[name] for name in mine})
        again = {n for n, _ in model_of(layers).named_parameters()} & found.keys()
        assert not again, "a parameter has two homes"
        found.update(mine)
    assert found.keys() == expected.keys()


@pytest.mark.parametrize("name", NAMES)
def test_buffers_and_fixed_values_are_those_of_a_model_built_for_real(name: str) -> None:
    real, made = build(name)[0], pipeline(build(name, device="meta")).original
    assert_equal(dict(made.named_buffers()), dict(real.named_buffers()))
    for parameter, (path, expected) in zip(
        made.parameters(), real.named_parameters(), strict=True
    ):
        if torch.equal(expected, torch.full_like(expected, expected.flatten()[0].item())):
            assert torch.equal(parameter, expected), path  # of a norm, or a bias
        elif expected.numel() > 1000:
            assert 0.9 < parameter.std() / expected.std() < 1.1, path


def test_another_seed_gives_other_values_and_the_same_one_the_same() -> None:
    one, same, other = (
        tensors(pipeline(build("gpt2", device="meta"), seed=seed).original) for seed in (0, 0, 1)
    )
    assert_equal(one, same)
    name = "transformer.h.0.attn.c_attn.weight"
    assert not torch.equal(one[name], other[name])
    assert not torch.equal(one[name], one[name.replace("h.0", "h.1")])


def test_a_tensor_that_transformers_marks_as_filled_is_filled_all_the_same() -> None:
    made = build("llama, tied", device="meta")
    for tensor in (*made[0].parameters(), *made[0].buffers()):
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # its own mark
    expected = tensors(pipeline(build("llama, tied", device="meta")).original)
    assert_equal(tensors(pipeline(made).original), expected)


def test_random_states_are_left_alone() -> None:
    before = torch.get_rng_state()
    pipeline(build("gpt2", device="meta"))
    assert torch.equal(torch.get_rng_state(), before)


def test_tied_parameters_stay_one() -> None:
    model, real = pipeline(build("t5", device="meta")).original, build("t5")[0]
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in real.named_parameters()]
    assert model.get_parameter("lm_head.weight") is model.get_parameter("shared.weight")


class Blocks(nn.Module):  # two blocks, and a buffer between them
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.unused = nn.Parameter(torch.empty(3))
        self.shift: Tensor
        self.register_buffer("shift", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x) + self.shift)


class Initialised(Blocks):  # fills what torch does not
    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            nn.init.ones_(self.unused)
            self.shift.copy_(torch.arange(4.0))


class Reset(Blocks):  # likewise, with a buffer made anew
    def reset_parameters(self) -> None:
        nn.init.ones_(self.unused)
        self.shift = torch.arange(4.0)


def on_meta(kind: Callable[[], nn.Module]) -> Layers:
    with torch.device("meta"):
        model = kind()
    return captured_layers(record_model(model, torch.zeros(2, 4)))


@pytest.mark.parametrize("kind", [Initialised, Reset])
def test_a_buffer_outside_blocks_is_on_every_stage(kind: type[Blocks]) -> None:
    for stage in range(2):
        layers = on_meta(kind)
        made_stages(layers, [1, 1], [stage])
        model = model_of(layers)
        assert torch.equal(model.get_buffer("shift"), torch.arange(4.0))
        own = {name for name, _ in model.named_parameters()}
        unused = {"unused"} if stage == 0 else set()  # has a home, though nobody uses it
        assert own == {f"layers.{stage}.weight", f"layers.{stage}.bias"} | unused


class Outer(Initialised):  # draws for its blocks itself, one after the other
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            for layer in self.layers:
                nn.init.normal_(layer.get_parameter("weight"))


def test_what_a_module_draws_for_several_blocks_does_not_depend_on_where_they_are() -> None:
    whole = on_meta(Outer)
    made_stages(whole, [2], [0])
    expected = tensors(model_of(whole))
    assert not torch.equal(expected["layers.0.weight"], expected["layers.1.weight"])
    for stage in range(2):
        layers = on_meta(Outer)
        made_stages(layers, [1, 1], [stage])
        found = tensors(model_of(layers))
        assert_equal(found, {name: expected[name] for name in found})


def test_what_nothing_fills_is_refused_by_name() -> None:
    layers = on_meta(Blocks)
    with pytest.raises(ConfigError) as caught:
        made_stages(layers, [1, 1], [0])
    assert "buffer 'shift' of '' (Blocks)" in str(caught.value)
    assert "parameter 'unused' of '' (Blocks)" in str(caught.value)
    assert "layers" not in str(caught.value)


def test_a_model_that_its_library_leaves_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"parameter 'logit_scale' of '' \(CLIPModel\)"):
        pipeline(build("clip", device="meta"))


def test_counts_of_stages_elsewhere_are_told() -> None:
    layers = layers_of(build("gpt2"))
    plans = layers.plan_stages(tuple(random_cut(len(layers), 3)))
    before = [plan.num_parameters for plan in plans]
    assert sum(before) == sum(p.numel() for p in model_of(layers).parameters())
    layers.place([(plans[1], CPU)], 0, draws=True)
    assert [plan.num_parameters for plan in plans] == before
