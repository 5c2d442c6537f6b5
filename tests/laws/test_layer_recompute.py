"""Some layers drop what they saved and run again alone: the same bits, with less in memory."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError, RandomnessError, RecomputeError
from penstock.schedules import one_f_one_b
from penstock.types import Recompute, Transport
from tests.kept import most_kept_bytes


class Model3(nn.Module):  # blocks whose calls are found in the model's own forward; one runs twice
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.2), nn.Linear(12, 6))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x + self.blocks[0](x))


def gradients(model: nn.Module, **options: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(12, 6, generator=generator), torch.randn(12, 3, generator=generator)
    told: dict[str, Any] = {"loss": nn.functional.mse_loss, "threads_per_stage": 1}
    pipe = penstock.Pipeline(
        model, num_stages=2, num_microbatches=4, example_inputs=x[:3], **options, **told
    )
    for _ in range(2):
        pipe.train_step(x, y)
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_a_captured_model_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    model = Model3()
    kept = gradients(copy.deepcopy(model), recompute=Recompute.NEVER)
    again = gradients(copy.deepcopy(model), recompute=Recompute.layers(*range(10)))
    moved = gradients(model, recompute=Recompute.layers("blocks.1.0", 7), offload=True)
    assert len(kept) == len(again) == len(moved) == 16 and all(map(torch.equal, kept, again))
    assert all(map(torch.equal, kept, moved))


def test_a_loss_over_the_whole_batch_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 4)]
    x, found = torch.randn(8, 4), []
    for recompute in (Recompute.NEVER, Recompute.layers(0, 1, 2)):
        twins = copy.deepcopy(layers)
        pipe = penstock.Pipeline(
            twins, num_stages=2, num_microbatches=4, recompute=recompute, offload=True
        )
        pipe(x).square().mean().backward()
        found.append([p.grad for p in pipe.parameters()])
    assert all(a is not None and torch.equal(a, b) for a, b in zip(*found, strict=True))


def kept_bytes(recompute: Any) -> int:
    """Return the most that a middle stage keeps of 8 micro-batches."""
    block = [nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)]
    layers = [nn.Linear(32, 32), nn.Sequential(*block), nn.Sequential(*block), nn.Linear(32, 1)]
    options: dict[str, Any] = {"partition": [1, 2, 1], "num_microbatches": 8, "schedule": "gpipe"}
    return most_kept_bytes(layers, 128, 1, recompute=recompute, **options)


def test_what_is_kept_lies_between_all_and_the_inputs() -> None:
    inputs, wide = 16 * 32 * 4, 2 * 16 * 256 * 4  # of a micro-batch: a block's input, its inside
    assert kept_bytes(Recompute.NEVER) == 8 * 2 * (inputs + wide)
    assert kept_bytes(Recompute.layers(2)) == 8 * (2 * inputs + wide) + wide
    assert kept_bytes(Recompute.layers(1, 2)) == 8 * 2 * inputs + wide
    assert kept_bytes(Recompute.STAGE) == 8 * inputs + inputs + 2 * wide


@pytest.mark.parametrize("num_layers", (2, 5))
def test_a_backward_holds_what_one_layer_saves_at_a_time(num_layers: int) -> None:
    inputs, wide = 16 * 32 * 4, 2 * 16 * 256 * 4  # of a micro-batch: a block's input, its inside
    block = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))
    options = {"num_microbatches": 8, "recompute": Recompute.layers(*range(1, num_layers + 1))}
    blocks = [copy.deepcopy(block) for _ in range(num_layers)]
    layers = [nn.Linear(32, 32), *blocks, nn.Linear(32, 1)]
    of_middle = most_kept_bytes(
        layers, 128, 1, partition=[1, num_layers, 1], schedule="gpipe", **options
    )
    assert of_middle == 8 * num_layers * inputs + wide
    # the last stage of 1F1B, whose backward follows its forward at once; the targets stay too
    of_last = most_kept_bytes(
        layers[:-1], 128, 32, partition=[1, num_layers], schedule=one_f_one_b, **options
    )
    assert of_last == (num_layers + 1) * inputs + wide


class Odd(nn.Module):  # do something that cannot be repeated, as `what` says
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.calls, self.own = what, 0, torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        match self.what:
            case "counts":
                return (x * self.calls).tanh()
            case "saves more":
                return (x.tanh() if self.calls > 4 else x * 2).tanh()
            case "saves less":
                return (x.tanh() if self.calls <= 4 else x * 2).tanh()
            case "widens":
                return (x.repeat(1, 1 + (self.calls > 4)).tanh()).sum(1, keepdim=True) * x
            case "own generator":
                return x * torch.rand(x.shape, generator=self.own)
            case "raises":
                if self.calls == 6:
                    raise ValueError("injected")
        return x.tanh()


def trained(layers: list[nn.Module], recompute: Any, steps: int = 1) -> list[Any]:
    options: dict[str, Any] = {"partition": [len(layers) - 1, 1], "num_microbatches": 4}
    options |= {"loss": nn.functional.mse_loss, "recompute": recompute}
    options |= {"transport": Transport.LOOPBACK}
    pipe = penstock.Pipeline(layers, **options)
    for _ in range(steps):
        pipe.train_step(torch.ones(8, 4), torch.ones(8, 4))
    return [p.grad for p in pipe.parameters()]


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("counts", RecomputeError, "did not give what its forward gave"),
        ("saves more", RecomputeError, "'1' .Odd. did not do what it did .* it saves more"),
        ("saves less", RecomputeError, "it saves 1 tensors for its backward, and had saved 2"),
        ("widens", RecomputeError, r"tensor 1 that it saves was torch.float32 of shape \(2, 4\)"),
        ("own generator", RandomnessError, "a generator of the layer's own"),
        ("raises", ValueError, "injected"),
    ],
)
def test_a_layer_that_cannot_be_repeated_is_named(what: str, error: Any, words: str) -> None:
    odd = Odd(what)
    layers = [nn.Linear(4, 4), odd, nn.Linear(4, 4)]
    with pytest.raises(error, match=words) as caught:
        trained(layers, Recompute.layers(1))
    assert any("stage 0" in note and "micro-batch" in note for note in caught.value.__notes__)
    for layer in layers:
        layer.zero_grad()
    odd.calls, odd.what = 0, ""
    again = trained(layers, Recompute.layers(1))
    for layer in layers:
        layer.zero_grad()
    assert all(map(torch.equal, again, trained(layers, Recompute.NEVER)))


class Penalty(nn.Module):  # add the gradient of what it is given with respect to what made it
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weights = [weight]

    def forward(self, x: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(x.sum(), self.weights, create_graph=True)
        return x + found.sum()


def test_a_gradient_through_a_dropped_layer_needs_what_is_gone() -> None:
    linear = nn.Linear(4, 4)
    layers = [linear, nn.Tanh(), Penalty(linear.weight), nn.Linear(4, 4)]
    expected = trained(copy.deepcopy(layers), Recompute.NEVER, steps=2)
    assert len(expected) == 4
    twins = copy.deepcopy(layers)
    with pytest.raises(RecomputeError, match="gradients are computed in a forward"):
        trained(twins, Recompute.layers(1), steps=2)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((9,), r"=Recompute.layers\(9\): the model has no layer 9; give names, such as '0'"),
        ((-1,), "the model has no layer -1"),
        ((True,), "the model has no layer True"),
        (("block",), "the model has no layer 'block'.* numbers from 0 to 2"),
    ],
)
def test_a_layer_that_is_not_there_is_refused(layers: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trained([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)], Recompute.layers(*layers))


def test_layers_are_known_by_name_and_number_and_the_plan_says_which() -> None:
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4)]
    pipe = penstock.Pipeline(
        layers, partition=[3, 1], num_microbatches=4, recompute=Recompute.layers("2", 0, 3)
    )
    plan = pipe.plan
    assert [plan.recomputed(stage) for stage in range(2)] == [(0, 2), (3,)]
    assert "recompute=layers(0, 2, 3)" in str(plan) and "recompute=layers(0, 2, 3)" in repr(pipe)
    rows = [line.split() for line in str(plan).splitlines()[-2:]]
    assert [" ".join(row[4:]) for row in rows] == ["2 40 layers 0, 2 0 cpu ?", "layers 3 1 cpu ?"]
    assert penstock.Plan.from_json(plan.to_json()) == plan
    assert [str(x) for x in pipe.schedule_for().programs[1]][1] == "1f0"
    free = penstock.Pipeline(
        layers, partition=[3, 1], recompute=Recompute.layers(0), num_microbatches=1
    ).plan
    assert free.recomputing == {0}
