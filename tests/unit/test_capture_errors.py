"""What cannot be cut is said before training, with the remedy; odd models that can be are cut."""

import copy
import random
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import CutError, GlueError
from penstock.model.ghost.layers import CapturedLayers
from penstock.model.ghost.record_model import Captured, record_model

WIDTH = 4


def inputs(batch: int = 3) -> Tensor:
    return torch.linspace(-1, 1, batch * WIDTH).view(batch, WIDTH)


class Chain(nn.Module):
    """Three blocks in a list; subclasses say what happens between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = self.between(block(x), number)
        return x

    def between(self, x: Tensor, _number: int) -> Tensor:
        return x


class Remembering(nn.Linear):
    """A block that leaves a tensor behind for another one."""

    memory: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) + sum(self.memory)
        self.memory.append(x.tanh())
        return x


class Sideways(Chain):
    def __init__(self) -> None:
        super().__init__()
        memory: list[Tensor] = []
        self.blocks = nn.ModuleList(Remembering(WIDTH, WIDTH) for _ in range(3))
        for block in self.blocks:
            block.memory = memory  # type: ignore[assignment]  # no module, no tensor

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[0].memory.clear()  # type: ignore[operator,union-attr]  # as above
        return super().forward(x)


class ByThread(Chain):
    """Goes another way on every thread, and so on every stage."""

    def between(self, x: Tensor, number: int) -> Tensor:
        other = number == 0 and threading.current_thread().name.endswith("-1")
        return x * 2 if other else x + 1


class Drawing(Chain):
    def between(self, x: Tensor, _number: int) -> Tensor:
        return x * random.random()


class DrawingInside(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


class Mapped(Chain):
    def between(self, x: Tensor, _number: int) -> Tensor:
        return torch.vmap(torch.sin)(x)


class Cache:
    """An object in which a tensor could hide."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class WithCache(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x, Cache(x)


class UsesCache(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = WithCache(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, cache = self.blocks[0](x)
        x = self.blocks[1](x)
        return self.blocks[2](x + cache.tensor)


def pipeline(model: nn.Module, **options: Any) -> penstock.Pipeline:
    return penstock.Pipeline(
        penstock.capture(model, inputs(), check=False),
        partition=[1, 1, 1],
        loss=nn.functional.mse_loss,
        threads_per_stage=1,
        **options,
    )


def test_too_few_blocks_are_named() -> None:
    with pytest.raises(CutError, match=r"4 stages asked, 3 block calls found: blocks\.0, blocks"):
        penstock.Pipeline(penstock.capture(Chain(), inputs(), check=False), num_stages=4)


def test_a_pattern_that_fits_nothing_is_named() -> None:
    with pytest.raises(CutError, match=r"no module of Chain is called 'layers\.\*'; there are"):
        record_model(Chain(), inputs(), blocks=["layers.*"])


def test_blocks_inside_each_other_are_refused() -> None:
    with pytest.raises(CutError, match=r"'blocks' and 'blocks\.0' inside it"):
        record_model(Chain(), inputs(), blocks=["blocks", "blocks.*"])


def test_a_tensor_on_a_side_way_is_refused_where_it_is_met() -> None:
    with pytest.raises(CutError, match=r"made inside 'blocks\.0' reaches 'blocks\.1' through an"):
        record_model(Sideways(), inputs())


def test_code_that_goes_another_way_on_another_stage_is_refused() -> None:
    with pipeline(ByThread()) as pipe, pytest.raises(GlueError, match=r"test_capture_errors\.py"):
        pipe.train_step(inputs(), inputs())


def test_random_numbers_between_blocks_that_are_not_torchs_are_refused() -> None:
    with pytest.raises(CutError, match=r"Python's or NumPy's random numbers before 'blocks\.1'"):
        record_model(Drawing(), inputs())
    inside = Chain()
    inside.blocks[1] = DrawingInside(WIDTH, WIDTH)
    state = random.getstate()
    assert len(record_model(inside, inputs()).calls) == 3
    assert random.getstate() == state


def test_code_that_cannot_be_followed_is_refused() -> None:
    with pytest.raises(GlueError, match=r"inside jit\.script, vmap or C\+\+, after 'blocks\.0'"):
        record_model(Mapped(), inputs())


def test_an_object_that_a_later_stage_uses_is_refused_there() -> None:
    model = UsesCache()
    assert any("returns a Cache" in warning for warning in record_model(model, inputs()).warnings)
    with pipeline(model) as pipe, pytest.raises(CutError, match="gave a Cache, which is used"):
        pipe.train_step(inputs(), inputs())


def test_without_values_a_branch_on_them_is_refused() -> None:
    class Deciding(Chain):
        def between(self, x: Tensor, _number: int) -> Tensor:
            return x if x.sum().item() > 0 else -x

    with torch.device("meta"):
        model = Deciding()
    with pytest.raises(GlueError, match=r"asks for values at test_capture_errors\.py"):
        record_model(model, inputs())


class Collecting(Chain):
    """Writes what it computes into a tensor that every stage would make for itself."""

    def forward(self, x: Tensor) -> Tensor:
        found = torch.zeros(len(x), 3, WIDTH)
        for number, block in enumerate(self.blocks):
            x = block(x)
            found[:, number] = x
        return found.sum(1)


class Masking(Chain):
    def between(self, x: Tensor, _number: int) -> Tensor:
        mask = torch.ones(x.shape)
        mask[x < 0] = 0.1
        return x * mask


class IntoOut(Chain):
    def between(self, x: Tensor, _number: int) -> Tensor:
        room = torch.empty(x.shape)
        with torch.no_grad():
            torch.mul(x, 2, out=room)
        return x + room


@pytest.mark.parametrize("kind", [Collecting, Masking, IntoOut])
def test_writing_into_what_each_stage_makes_for_itself_is_refused(kind: type[Chain]) -> None:
    with pytest.raises(CutError, match=r"writes a routed value into a tensor .*new_zeros"):
        record_model(kind(), inputs())


class Counting(Chain):
    count = 0

    def between(self, x: Tensor, _number: int) -> Tensor:
        self.count += 1
        return x * self.count


class Keeping(Chain):
    kept: Tensor

    def between(self, x: Tensor, number: int) -> Tensor:
        if number == 0:
            self.kept = x
        return x + self.kept


class Moving(Chain):
    """Moves a buffer of its own, as BatchNorm does."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def between(self, x: Tensor, _number: int) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class Normalised(Chain):
    """Has a module with buffers and no parameters between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def between(self, x: Tensor, _number: int) -> Tensor:
        return self.norm(x)


@pytest.mark.parametrize("kind", [Counting, Keeping, Moving, Normalised])
def test_state_that_changes_outside_blocks_is_refused(kind: type[Chain]) -> None:
    model = kind()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(CutError):
        record_model(model, inputs())
    assert {n: b.tolist() for n, b in model.named_buffers()} == {
        n: b.tolist() for n, b in before.items()
    }


class Tied(Chain):
    """Its last block has the weight of the first one, and uses it in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = Checkpointed(WIDTH, WIDTH)
        self.blocks[2].weight = self.blocks[0].weight


class Checkpointed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return result


def test_a_tied_weight_in_a_reentrant_checkpoint_is_refused() -> None:
    with pipeline(Tied()) as pipe, pytest.raises(CutError, match="read without gradients"):
        pipe.train_step(inputs(), inputs())


class OftenOrSeldom(Chain):
    """Calls its last block as often as there are samples."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        for _ in range(len(x) - 1):
            x = self.blocks[2](x)
        return x


def test_another_number_of_calls_than_with_the_example_is_refused() -> None:
    layers = penstock.capture(OftenOrSeldom(), inputs(3), check=False)
    for batch, message in ((5, "was not called so often"), (1, r"forward ended on stage \d of 4")):
        with (
            penstock.Pipeline(
                layers, partition=[1, 1, 1, 1], loss=nn.functional.mse_loss, threads_per_stage=1
            ) as pipe,
            pytest.raises(GlueError, match=message),
        ):
            pipe.train_step(inputs(batch), inputs(batch))


# -- odd, and cut all the same ----------------------------------------------------------------


@dataclass
class Pair:
    """What goes from block to block."""

    value: Tensor
    scale: float


class PairBlock(nn.Linear):
    def forward(self, pair: Pair) -> Pair:  # type: ignore[override]  # on purpose
        return Pair(super().forward(pair.value) * pair.scale, pair.scale / 2)


class Pairs(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PairBlock(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        pair = Pair(x, 2.0)
        for block in self.blocks:
            pair = block(pair)
        return pair.value


class InPlace(Chain):
    """Changes values between blocks in place, also through a view, and uses them later."""

    def between(self, x: Tensor, number: int) -> Tensor:
        x += 1
        x.mul_(0.5)
        x[:, number] = 0.0
        return x


class Twice(Chain):
    """Calls one block again and again."""

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            x = x + block(x).tanh()
        return x


class Double(torch.autograd.Function):
    """Gives twice its input, and three times the gradient."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Any:
        return gradient * 3


class OwnFunction(Chain):
    def between(self, x: Tensor, _number: int) -> Tensor:
        return Double.apply(x)


class Hooked(Chain):
    """Has a hook that changes what a block gives."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_hook(lambda _module, _inputs, output: output * 2)


class HookedTwice(Hooked):
    """The block with the hook is called on two stages, at once."""

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            x = x + block(x).tanh()
        return x


class Frozen(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)


class Picking(Chain):
    """Takes as many rows as the values say."""

    def between(self, x: Tensor, number: int) -> Tensor:
        if number == 1:
            chosen = x[x[:, 0] > x[:, 0].min()]
            x = x + chosen.mean(0) * chosen.shape[0]
        return x


class WithToken(Chain):
    """Reads parameters between blocks where nothing routed takes part, and its own mode."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.linspace(0, 1, WIDTH))
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("offset", torch.full((WIDTH,), 0.5))

    def between(self, x: Tensor, _number: int) -> Tensor:
        token = self.token.exp().expand(len(x), -1)
        x = x + token * (2.0 if self.training else 1.0)
        return x * self.scale.exp() + self.offset


@pytest.mark.parametrize(
    "kind", [Pairs, InPlace, Twice, WithToken, OwnFunction, Hooked, HookedTwice, Frozen, Picking]
)
def test_odd_models_are_cut_all_the_same(kind: type[Chain]) -> None:
    torch.manual_seed(0)
    whole = kind()
    cut = copy.deepcopy(whole)
    loss = nn.functional.mse_loss(whole(inputs()), inputs() / 2)
    loss.backward()
    with pipeline(cut) as pipe:
        found = pipe.train_step(inputs(), inputs() / 2)
    assert torch.equal(found, loss.detach())
    for (name, expected), parameter in zip(
        whole.named_parameters(), cut.parameters(), strict=True
    ):
        same = expected.grad is parameter.grad is None
        assert same or torch.equal(parameter.grad, expected.grad), name  # type: ignore[arg-type]


def test_the_models_own_mode_and_buffers_are_the_pipelines() -> None:
    model = WithToken()
    with pipeline(model) as pipe:
        assert pipe.state_dict().keys() == model.state_dict().keys()
        found = pipe.eval_step(inputs())
        assert model.training
        pipe.eval()
        assert not model.training
        assert torch.equal(found, model(inputs()))
        pipe.double()
        assert model.offset.dtype == torch.float64


def test_a_capture_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    whole = nn.ModuleDict({"inner": model})
    whole.forward = model.forward
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    record_model(whole, inputs())
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model] == [True, False, True]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert type(model[0]) is not nn.Linear and isinstance(model[0], nn.Linear)
    assert type(copy.deepcopy(model)[0]) is nn.Linear


def test_a_model_without_values_is_captured_at_once() -> None:
    with torch.device("meta"):
        model = Chain()
    captured: Captured = record_model(model, inputs())
    assert captured.calls == (("blocks.0", 0), ("blocks.1", 0), ("blocks.2", 0))
    assert captured.live_bytes() == (3 * WIDTH * 4,) * 3
    assert CapturedLayers.of(captured).parameter_counts() == (WIDTH * (WIDTH + 1),) * 3
