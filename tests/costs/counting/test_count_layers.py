"""What layers keep and hand over is counted without values, and no model notices."""

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock import Layer, Layers, capture
from penstock.costs.counting.count import count_layers
from penstock.costs.measuring.measure import measure_bytes
from penstock.costs.records import Part, Value
from penstock.errors import BatchError, ConfigError
from penstock.model.layer_list import as_layers
from penstock.model.pytree import flatten
from penstock.model.stage_plan import Step
from penstock.runtime.unsplit import left_bytes
from penstock.torch_private import storage_id
from penstock_recipes.zoo import transformer_lm
from tests.costs.counting.counted import count_one, flops, layers_of, of_class
from tests.recipes.zoo_members import ZOO_MEMBERS

AMOEBANET = pytest.param("amoebanet_d", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["resnet", AMOEBANET, "unet", "transformer_lm"])
def test_what_is_saved_is_what_hooks_see_of_tensors_with_values(name: str) -> None:
    model, inputs = ZOO_MEMBERS[name]()
    check_what_is_saved(layers_of(model, inputs), inputs)


@pytest.mark.parametrize("needs_weights", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_within_a_function_of_torch_keeps_what_its_kernel_does(
    dropout: float, needs_weights: bool
) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, dropout, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.attention(x, x, x, need_weights=needs_weights)[0]
            return found

    encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
    inputs = torch.randn(4, 24, 16)
    check_what_is_saved(as_layers([nn.Linear(16, 16), Attention(), encoder]), inputs)


def check_what_is_saved(layers: Layers, inputs: Any) -> None:
    """Compare what is counted without values with what hooks see."""
    counted = count_layers(layers, inputs, torch_type="cpu")
    saved: dict[int, Tensor] = {}
    alive: list[Tensor] = []
    seen: list[tuple[int, int]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved[storage_id(tensor)] = tensor
        return tensor

    def perform(step: Step, function: Any) -> Any:
        saved.clear()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            result = function()
        for parameter in (*step.module.parameters(), *step.module.buffers()):
            saved.pop(storage_id(parameter), None)
        ends = {storage_id(t) for t in flatten((function.args, result))[0]}
        sizes = {s: t.untyped_storage().nbytes() for s, t in saved.items()}
        alive.extend((*saved.values(), *flatten(result)[0]))
        inner = sum(size for s, size in sizes.items() if s not in ends)
        seen.append((inner, sum(sizes.values()) - inner))
        return result

    layers.run(inputs, perform)
    for number, kept in enumerate(seen):
        at_ends = {counted.values[p].storage: counted.values[p] for p in counted.saved[number]}
        found = counted.layer(number).inner_bytes, sum(v.num_bytes for v in at_ends.values())
        assert found == kept, layers.steps[number].label


def test_gradients_of_a_tied_weight_are_added_up_in_the_first_of_its_layers() -> None:
    model, inputs = ZOO_MEMBERS["gpt, tied"]()
    counted = count_layers(capture(model, inputs), inputs)
    size = model.get_parameter("embedding.words.weight").numel() * 4
    sums = [
        [
            o
            for o in of_class(counted.kinds[n], "elementwise", Part.WEIGHT)
            if o.num_bytes == 3 * size
        ]
        for n in counted.kind_of
    ]
    assert [len(each) for each in sums] == [1] + [0] * (len(sums) - 1)


def test_layers_that_are_alike_are_there_once() -> None:
    block = [nn.Linear(4, 4), nn.ReLU()]
    layers = as_layers(nn.Sequential(*block, *[m for _ in range(9) for m in block]))
    counted = count_layers(as_layers([copy.deepcopy(s.module) for s in layers]), torch.empty(2, 4))
    assert counted.kind_of == (0, 1, *[2, 1] * 9)


class Add(nn.Module):
    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return x + skip


def test_layers_of_unlike_classes_are_of_unlike_kinds_whatever_operators_they_run() -> None:
    class Logged(nn.Linear):
        """Runs Python that no operator shows."""

    inner = nn.Sequential(Logged(4, 4))
    layers = as_layers([nn.Linear(4, 4), Logged(4, 4), nn.Linear(4, 4), inner, Logged(4, 4)])
    counted = count_layers(layers, torch.empty(2, 4))
    assert counted.kind_of == (0, 1, 2, 3, 1)


def test_a_skip_is_a_value_with_its_own_consumers() -> None:
    layers = as_layers(
        [
            Layer(nn.Linear(4, 4), outputs="skip"),
            nn.Tanh(),
            nn.Flatten(),
            Layer(Add(), inputs=("skip", "input")),
        ]
    )
    counted = count_layers(layers, torch.empty(2, 4))
    linear, tanh = (Value(0, (1, 3), 32, 1), Value(1, (2,), 32, 2))
    flat = Value(2, (), 32, 2)  # nobody reads it, so it is not there
    assert flat not in counted.values
    assert counted.values == (
        Value(-1, (0, 3), 32, 0, has_gradient=False),
        linear,
        tanh,
        Value(3, (), 32, 3),
    )
    assert counted.saved == ((0,), (2,), (), ())
    assert counted.microbatch_size == 2


def test_tensors_that_share_memory_have_one_storage() -> None:
    layers = as_layers(nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Unflatten(1, (2, 2))))
    counted = count_layers(layers, torch.empty(2, 4))
    assert [value.storage for value in counted.values] == [0, 1, 1, 1]


def test_a_tied_weight_of_a_captured_model_is_a_value() -> None:
    model, inputs = ZOO_MEMBERS["gpt, tied"]()
    layers = capture(model, inputs)
    counted = count_layers(layers, inputs)
    (tied,) = (value for value in counted.values if value.is_weight)
    size = model.get_parameter("embedding.words.weight").numel() * 4
    assert tied == Value(0, (len(layers) - 1,), size, tied.storage, is_weight=True)


def test_code_between_the_blocks_of_a_captured_model_is_counted() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.head = nn.Parameter(torch.empty(4, 5))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x @ self.head

    inputs = torch.empty(2, 4)
    counted = count_layers(capture(Scaled(), inputs, blocks=["blocks.*"]), inputs)
    first, middle, last = (counted.layer(n) for n in range(3))
    assert len(of_class(middle, "elementwise", Part.FORWARD)) == 1
    assert [o.dims for o in of_class(last, "gemm", Part.FORWARD)] == [(2, 4, 4), (2, 5, 4)]
    assert len(of_class(last, "gemm", Part.WEIGHT)) == 2
    assert not of_class(first, "gemm", Part.INPUT)


def test_the_model_is_as_it_was() -> None:
    model, inputs = ZOO_MEMBERS["resnet"]()
    tensors = [*model.parameters(), *model.buffers()]
    before = [(id(tensor), tensor.detach().clone()) for tensor in tensors]
    random = torch.get_rng_state()
    count_layers(layers_of(model, inputs), inputs, left=left_bytes)
    after = [*model.parameters(), *model.buffers()]
    assert [id(tensor) for tensor in after] == [number for number, _ in before]
    assert all(torch.equal(a, b) for a, (_, b) in zip(after, before, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("name", ["resnet", "transformer_lm", "unet"])
def test_layers_keep_what_they_keep_of_tensors_with_values(name: str) -> None:
    model, inputs = ZOO_MEMBERS[name]()
    layers = layers_of(model, inputs)
    counted = count_layers(layers, inputs, left=left_bytes, torch_type="cpu")
    measured = measure_bytes(layers, inputs, left_bytes)
    for n in range(len(layers)):
        assert counted.layer(n).inner_bytes == measured.layer(n).inner_bytes
        assert counted.layer(n).left_bytes == measured.layer(n).left_bytes
    assert any(counted.layer(n).left_bytes for n in range(len(layers)))
    assert (counted.values, counted.saved) == (measured.values, measured.saved)


class Chooses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Selects(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


def test_inputs_of_a_wrong_shape_are_refused_with_the_layer_and_the_shapes() -> None:
    layers = as_layers(nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 3)))
    with pytest.raises(BatchError, match=r"layer '1' \(Linear\) .* float32 of shape \(2, 4\); gi"):
        count_layers(layers, torch.randn(2, 4))
    alone = as_layers(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(BatchError, match=r"the loss does not take what reaches it .a and b"):
        count_layers(alone, torch.randn(2, 4), loss=torch.matmul, targets=torch.randn(2, 3))


@pytest.mark.parametrize("module", [Chooses(), Selects()])
def test_a_layer_that_needs_values_is_named(module: nn.Module) -> None:
    layers = as_layers(nn.Sequential(nn.Linear(4, 4), module))
    with pytest.raises(ConfigError, match=f"layer '1' .{type(module).__name__}. needs the values"):
        count_layers(layers, torch.empty(2, 4))


class Masks(nn.Module):
    def forward(self, mask: Tensor) -> Tensor:
        return mask.float() if mask.all() else mask.float() @ mask.float().t()


@pytest.mark.parametrize("hides", [False, True])
def test_a_mask_has_its_values(hides: bool) -> None:
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[1, 2] = not hides
    found = count_layers(as_layers(nn.Sequential(Masks())), mask)
    names = {operator.name for kind in found.kinds for operator in kind.operators}
    assert ("gemm" in names) == hides, names


def test_code_between_blocks_may_look_at_what_it_makes_itself() -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Embedding(9, 4)
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            places = torch.arange(x.shape[1], device=x.device)
            if (places.diff() == 1).all():
                x = x + self.places(places)
            for block in self.blocks:
                x = block(x)
            return x

    inputs = torch.empty(2, 3, 4)
    layers = capture(Placed(), inputs, blocks=["places", "blocks.*"])
    counted = count_layers(layers, inputs)
    assert [value.producer for value in counted.values] == [-1, 0, 1, 2]
    assert [value.consumers for value in counted.values] == [(0,), (1,), (2,), ()]
    assert of_class(counted.layer(0), "embedding", Part.WEIGHT)


class Masked(nn.Module):
    """Makes tensors on the CPU, whose values it may look at, and keeps one of its own aside."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = [torch.ones(4)]

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(4)
        scale = 2.0 if mask.sum() == 4 else 3.0
        return x * mask * scale + self.aside[0]


def test_tensors_with_values_may_meet_those_without() -> None:
    assert sum(o.count for o in count_one(Masked(), 2, 4).operators) > 3


@pytest.mark.slow
def test_a_hundred_billion_parameters_are_counted_without_memory_for_them() -> None:
    with torch.device("meta"):
        model = transformer_lm(100, width=9216, ff_width=4 * 9216, num_heads=72)
    num_parameters = sum(p.numel() for p in model.parameters())
    assert num_parameters > 100e9
    words = torch.empty(1, 1024, dtype=torch.long, device="meta")
    counted = count_layers(as_layers(model), words)
    assert len(counted.kinds) <= 6
    forward = flops(counted, Part.FORWARD)
    products = 2 * 1024 * (num_parameters - 32_000 * 9216)
    attention = 100 * 2 * 1024 * 1025 * 9216
    assert forward == pytest.approx(products + attention, rel=1e-3)
    assert flops(counted, Part.WEIGHT) == pytest.approx(products, rel=1e-3)


_DEEP = """
import torch
from penstock import Layers
from penstock.costs.counting.count import count_layers
from penstock.model.layer_list import as_layers

class Deep(torch.nn.Module):
    def forward(self, value):
        for _ in range(3_000):
            value = value * 2.0
        return value

layers = as_layers([torch.nn.Linear(2, 2), Deep()])
print(len(count_layers(layers, torch.ones(1, 2)).kind_of))
"""


@pytest.mark.slow
def test_a_graph_may_be_deeper_than_the_stack() -> None:
    done = subprocess.run(
        ["bash", "-c", 'ulimit -s 512; exec "$0" -c "$1"', sys.executable, _DEEP],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
