"""The operators that are counted without values are those of a run with values."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from penstock.costs.counting.count import count_layers
from penstock.costs.records import VIEW, Part
from penstock.errors import ConfigError
from penstock.model.layer_list import as_layers
from penstock.model.pytree import flatten
from tests.costs.counting.counted import count_one, flops, layers_of, of_class
from tests.recipes.zoo_members import ZOO_MEMBERS


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * n.startswith("amoebanet")) for n in ZOO_MEMBERS],
)
def test_the_products_are_those_of_the_unsplit_model(name: str) -> None:
    model, inputs = ZOO_MEMBERS[name]()
    counted = count_layers(layers_of(model, inputs), inputs, torch_type="cpu")
    with FlopCounterMode(display=False) as forward:
        output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    assert flops(counted, Part.FORWARD) == forward.get_total_flops()
    if name == "amoebanet_b":  # torch counts weights of grouped convolutions as of whole ones
        assert flops(counted, Part.WEIGHT) == forward.get_total_flops()
        return
    roots = [tensor for tensor in flatten(output)[0] if tensor.requires_grad]
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    both = flops(counted, Part.INPUT, Part.WEIGHT)
    assert both == backward.get_total_flops()


def test_batch_norm_passes_three_times_forward_and_five_times_backward() -> None:
    numbers = 2 * 4 * 8 * 8
    kind = count_one(nn.BatchNorm2d(4), 2, 4, 8, 8)
    (forward,) = of_class(kind, "norm", Part.FORWARD)
    (backward,) = of_class(kind, "norm", Part.INPUT)
    assert 3 * numbers * 4 <= forward.num_bytes < 3.3 * numbers * 4
    assert 5 * numbers * 4 <= backward.num_bytes < 5.3 * numbers * 4
    (evaluated,) = of_class(count_one(nn.BatchNorm2d(4).eval(), 2, 4, 8, 8), "norm", Part.FORWARD)
    assert 2 * numbers * 4 <= evaluated.num_bytes < 2.3 * numbers * 4


def test_a_pool_writes_indices_of_eight_bytes_and_its_backward_reads_them() -> None:
    kind = count_one(nn.MaxPool2d(2), 2, 4, 8, 8)
    (forward,) = of_class(kind, "pool", Part.FORWARD)
    (backward,) = of_class(kind, "pool", Part.INPUT)
    whole, pooled = 2 * 4 * 8 * 8, 2 * 4 * 4 * 4
    assert forward.num_bytes == whole * 4 + pooled * (4 + 8)
    assert backward.num_bytes == pooled * (4 + 8) + 2 * whole * 4
    assert kind.inner_bytes == pooled * 8


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.Conv2d(4, 6, 1), "conv1x1"),
        (nn.Conv2d(4, 6, 1, groups=2), "conv"),
        (nn.Conv2d(4, 6, 3, padding=1), "conv3x3"),
        (nn.Conv2d(4, 6, 3, stride=2, padding=1), "conv"),
        (nn.Conv2d(4, 6, 3, dilation=2), "conv"),
        (nn.Conv2d(4, 6, (1, 7)), "conv"),
        (nn.Conv2d(4, 4, 3, padding=1, groups=4), "conv"),
        (nn.ConvTranspose2d(4, 6, 2, stride=2), "conv"),
    ],
)
def test_a_convolution_is_a_product_in_each_of_its_parts(module: nn.Module, name: str) -> None:
    kind = count_one(module, 2, 4, 8, 8)
    found = [operator for part in Part for operator in of_class(kind, name, part)]
    assert [operator.part for operator in found] == list(Part)
    assert len({operator.flops for operator in found}) == 1
    for operator in found:
        rows, columns, depth = operator.dims
        product = 2 * rows * columns * depth * operator.batch
        assert product <= operator.flops < product * (1 + 1 / depth)  # edges have fewer taps
    (bias,) = of_class(kind, "reduce", Part.WEIGHT)
    images = module(torch.empty(2, 4, 8, 8)).numel()
    assert bias.num_bytes == (images + module.get_parameter("bias").numel()) * 4


def test_a_linear_layer_has_one_product_in_each_part() -> None:
    kind = count_one(nn.Linear(8, 16), 4, 8)
    dims = {part: of_class(kind, "gemm", part)[0].dims for part in Part}
    assert dims == {Part.FORWARD: (4, 16, 8), Part.INPUT: (4, 8, 16), Part.WEIGHT: (16, 8, 4)}
    (forward,) = of_class(kind, "gemm", Part.FORWARD)
    assert forward.num_bytes == (4 * 8 + 8 * 16 + 16 + 4 * 16) * 4
    (bias,) = of_class(kind, "reduce", Part.WEIGHT)
    assert bias.num_bytes == (4 * 16 + 16) * 4


@pytest.mark.parametrize(("rows", "columns", "alignment"), [(5, 16, 8), (8, 33, 1), (8, 36, 4)])
def test_a_product_is_aligned_as_rows_are_in_memory(
    rows: int, columns: int, alignment: int
) -> None:
    kind = count_one(nn.Linear(8, columns), rows, 8)
    assert {x.alignment for x in kind.operators if x.name == "gemm"} == {alignment}


def test_what_wants_no_gradient_costs_none() -> None:
    layers = as_layers(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    first, _, last = (
        count_layers(layers, torch.empty(2, 4)).kinds[n]
        for n in count_layers(layers, torch.empty(2, 4)).kind_of
    )
    assert [of_class(first, "gemm", part) for part in (Part.INPUT,)] == [[]]
    assert of_class(last, "gemm", Part.INPUT)
    for parameter in layers.steps[2].module.parameters():
        parameter.requires_grad_(False)
    frozen = count_layers(layers, torch.empty(2, 4)).layer(2)
    assert of_class(frozen, "gemm", Part.INPUT)
    assert not of_class(frozen, "gemm", Part.WEIGHT)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin() + x.cos()


def test_gradients_that_meet_are_added_up() -> None:
    kind = count_one(Doubled(), 8)
    once = of_class(count_one(Sine(), 8), "elementwise", Part.INPUT)
    assert sum(o.count for o in once) == 2  # the cosine, and the product with it
    meeting = of_class(kind, "elementwise", Part.INPUT)
    assert sum(o.count for o in meeting) == 2 + 3 + 1  # the sine is negated, and one sum
    assert sum(o.count for o in meeting if o.num_bytes == 3 * 8 * 4) == 2 + 1


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class Products(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        left, right = x.split(4)
        return torch.cat([left * right, left * left, x * x.clone(), x * x])


def test_what_is_read_twice_from_the_same_memory_is_read_once() -> None:
    products = of_class(count_one(Products(), 8), "elementwise", Part.FORWARD)
    halves, wholes = [3 * 4 * 4, 2 * 4 * 4], [3 * 8 * 4, 2 * 8 * 4]
    assert [operator.num_bytes for operator in products] == halves + wholes


def test_the_loss_is_counted_where_it_is_given() -> None:
    layers, inputs = as_layers(nn.Sequential(nn.Linear(4, 9))), torch.empty(2, 4)
    targets = torch.empty(2, dtype=torch.long)
    with_loss = count_layers(layers, inputs, loss=F.cross_entropy, targets=targets).loss
    assert with_loss is not None
    assert {operator.name for operator in with_loss.operators} == {"reduce", VIEW}
    assert {operator.part for operator in with_loss.operators} == {Part.FORWARD, Part.INPUT}
    assert with_loss.inner_bytes >= 2 * 9 * 4
    assert count_layers(layers, inputs).loss is None


def test_a_gpu_has_kernels_of_its_own_for_attention_and_dropout() -> None:
    dropout = nn.Dropout(0.5)
    on_gpu, on_cpu = count_one(dropout, 8), count_one(dropout, 8, torch_type="cpu")
    assert (on_gpu.inner_bytes, on_cpu.inner_bytes) == (8 * 1, 8 * 4)
    assert on_gpu.draws and on_cpu.draws

    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    fused, unfused = (
        count_one(Attention(), 2, 4, 32, 8, torch_type=kind) for kind in ("cuda", "xla")
    )
    seen = 32 * 33 // 2  # keys of all positions, each up to its own
    products = 2 * (2 * 4 * seen * 8)
    assert of_class(fused, "attention", Part.FORWARD)[0].flops == 2 * products
    assert of_class(fused, "attention", Part.INPUT)[0].flops == 5 * products
    assert not of_class(unfused, "attention", Part.FORWARD)
    assert fused.inner_bytes < unfused.inner_bytes
    assert not fused.draws


@pytest.mark.parametrize(("rows", "columns", "seen"), [(3, 5, 1 + 2 + 3), (5, 3, 1 + 2 + 3 * 3)])
def test_causal_attention_sees_keys_from_the_first_on(rows: int, columns: int, seen: int) -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            keys = torch.empty(2, 4, columns, 8, device=x.device)
            return F.scaled_dot_product_attention(x, keys, keys, is_causal=True)

    counted = count_one(Attention(), 2, 4, rows, 8)
    assert of_class(counted, "attention", Part.FORWARD)[0].flops == 2 * 2 * (2 * 4 * seen * 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_queries_have_the_kernel_of_16_bits_only(dtype: torch.dtype) -> None:
    class Grouped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q, keys = x.to(dtype), x[:, :2].to(dtype)
            return F.scaled_dot_product_attention(q, keys, keys, enable_gqa=True).to(x.dtype)

    counted, products = count_one(Grouped(), 2, 8, 32, 8), 2 * (2 * 8 * 32 * 32 * 8)
    for part, number in ((Part.FORWARD, 2), (Part.INPUT, 5)):
        found = [own.flops for own in of_class(counted, "attention", part)]
        assert found == ([number * products] if dtype is torch.bfloat16 else [])


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.reentrant = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), reentrant

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.linear, x, use_reentrant=self.reentrant)
        return found


def test_what_a_checkpoint_computes_again_is_of_the_backward() -> None:
    kind = count_one(Checkpointed(reentrant=False), 2, 4)
    assert [o.dims for o in of_class(kind, "gemm", Part.INPUT)] == [(2, 4, 4)] * 2
    layers = as_layers([nn.Linear(4, 4), Checkpointed(reentrant=True)])
    with pytest.raises(ConfigError, match=r"layer '1' \(Checkpointed\).*use_reentrant=False"):
        count_layers(layers, torch.empty(2, 4))
