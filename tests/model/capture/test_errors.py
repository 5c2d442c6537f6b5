"""What cannot be cut is said before training, with the remedy."""

import copy
import random
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import CutError, GlueError, RouteError
from penstock.model.capture.captured import Captured, record_model
from penstock.model.capture.source import captured_layers
from tests.model.capture.any_models.chain import WIDTH, Chain, inputs
from tests.model.capture.any_models.lists import REFUSED
from tests.model.capture.any_models.odd import WithToken
from tests.model.capture.any_models.refused import Refused


class ByThread(Chain):
    """Goes another way on every thread, and so on every stage."""

    def between(self, x: Tensor, number: int) -> Tensor:
        other = number == 0 and threading.current_thread().name.endswith("-1")
        return x * 2 if other else x + 1


class DrawingInside(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


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
        captured_layers(record_model(model, inputs())),
        partition=[1, 1, 1],
        loss=nn.functional.mse_loss,
        threads_per_stage=1,
        **options,
    )


def test_too_few_blocks_are_named() -> None:
    with pytest.raises(CutError, match=r"4 stages asked, 3 block calls found: blocks\.0, blocks"):
        penstock.Pipeline(captured_layers(record_model(Chain(), inputs())), num_stages=4)


def test_a_pattern_that_fits_nothing_is_named() -> None:
    with pytest.raises(CutError, match=r"no module of Chain is called 'layers\.\*'; there are"):
        record_model(Chain(), inputs(), blocks=["layers.*"])


def test_blocks_inside_each_other_are_refused() -> None:
    with pytest.raises(CutError, match=r"'blocks' and 'blocks\.0' inside it"):
        record_model(Chain(), inputs(), blocks=["blocks", "blocks.*"])


def test_code_that_goes_another_way_on_another_stage_is_refused() -> None:
    with pipeline(ByThread()) as pipe, pytest.raises(GlueError, match=r"test_errors\.py"):
        pipe.train_step(inputs(), inputs())


@pytest.mark.parametrize("refused", [pytest.param(r, id=r.name) for r in REFUSED])
def test_what_would_be_wrong_is_refused_and_left_as_it_was(refused: Refused) -> None:
    model = refused.build()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = copy.deepcopy(getattr(model, "state", None))
    with pytest.raises(refused.error, match=refused.message):
        record_model(model, inputs())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])
    assert getattr(model, "state", None) == state


def test_random_numbers_inside_a_block_may_be_pythons() -> None:
    inside = Chain()
    inside.blocks[1] = DrawingInside(WIDTH, WIDTH)
    state = random.getstate()
    assert len(record_model(inside, inputs()).calls) == 3
    assert random.getstate() == state


def test_an_object_that_a_later_stage_uses_is_refused_there() -> None:
    model = UsesCache()
    assert any("returns a Cache" in warning for warning in record_model(model, inputs()).warnings)
    with pipeline(model) as pipe, pytest.raises(CutError, match="gave a Cache, which a later"):
        pipe.train_step(inputs(), inputs())


def test_without_values_a_branch_on_them_is_refused() -> None:
    class Deciding(Chain):
        def between(self, x: Tensor, _number: int) -> Tensor:
            return x if x.sum().item() > 0 else -x

    with torch.device("meta"):
        model = Deciding()
    with pytest.raises(GlueError, match=r"asks for values at test_errors\.py"):
        record_model(model, inputs())


class LateHook(Chain):
    """Hooks on to the gradient of a value after another block has used it."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        if first.requires_grad:
            first.register_hook(lambda gradient: gradient.clamp(max=0.1))
        return self.blocks[2](first + second)


def test_a_hook_on_a_gradient_that_two_stages_add_to_is_refused() -> None:
    with pipeline(LateHook()) as pipe, pytest.raises(CutError, match="a part of the gradient"):
        pipe.train_step(inputs(), inputs())


def test_a_hook_on_a_gradient_may_be_set_without_looking() -> None:
    class Hooking(Chain):
        def between(self, x: Tensor, _number: int) -> Tensor:
            x.register_hook(lambda gradient: gradient * 2)
            return x

    whole = Hooking()
    cut = copy.deepcopy(whole)
    nn.functional.mse_loss(whole(inputs()), inputs()).backward()
    with pipeline(cut) as pipe:
        pipe.train_step(inputs(), inputs())
    for mine, theirs in zip(cut.parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.equal(mine.grad, theirs.grad)


class NothingToDifferentiate(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


def test_a_reentrant_checkpoint_without_gradients_is_refused() -> None:
    with pytest.raises(CutError, match="nothing that requires a grad"):
        record_model(NothingToDifferentiate(), inputs())


class Shaking(torch.autograd.Function):
    """Draws where nobody can know."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand(len(x), 1)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Any:
        return gradient


def test_what_draws_between_blocks_and_is_not_known_to_is_refused() -> None:
    class Shaken(Chain):
        def between(self, x: Tensor, _number: int) -> Tensor:
            return Shaking.apply(x)

    with pytest.raises(CutError, match=r"'Shaking\.apply' draws random numbers between blocks"):
        record_model(Shaken(), inputs())


def test_a_value_of_another_forward_is_refused() -> None:
    kept: list[Tensor] = []

    class Enclosing(Chain):
        def between(self, x: Tensor, number: int) -> Tensor:
            kept.append(x)
            return x + kept[number]

    with pytest.raises(GlueError, match="of another micro-batch is read"):
        record_model(Enclosing(), inputs())


def test_a_cache_in_the_output_is_not_there_to_use() -> None:
    class GivesCache(Chain):
        def forward(self, x: Tensor) -> Any:
            x = super().forward(x)
            return x, Cache(x)

    with pipeline(GivesCache()) as pipe:
        x, cache = pipe.eval_step(inputs())
        assert x.shape == inputs().shape
        with pytest.raises(CutError, match="the model's output holds a Cache"):
            cache.tensor.sum()


def test_a_flag_may_be_set_once_and_for_all() -> None:
    class Preparing(Chain):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "is_prepared"):
                self.is_prepared = True
                self.blocks[0].register_forward_hook(lambda *args: args[-1] * 2)
            return super().forward(x)

    model = Preparing()
    whole = copy.deepcopy(model)
    with pipeline(model) as pipe:
        assert not hasattr(model, "is_prepared")
        assert torch.equal(pipe.eval_step(inputs()), whole(inputs()))


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
    with pipeline(Tied()) as pipe, pytest.raises(CutError, match="read in a reentrant checkpoint"):
        pipe.train_step(inputs(), inputs())


class Clamping(nn.Linear):
    """Keeps its weight small."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_a_tied_weight_that_a_block_has_changed_in_place_is_refused_at_capture() -> None:
    model = Chain()
    model.blocks[2] = Clamping(WIDTH, WIDTH)
    model.blocks[2].weight = model.blocks[0].weight
    with pytest.raises(CutError, match=r"changes in place .* \(test_errors\.py:\d+\).*together="):
        penstock.capture(model, inputs())


class OftenOrSeldom(Chain):
    """Calls its last block as often as there are samples."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        for _ in range(len(x) - 1):
            x = self.blocks[2](x)
        return x


def test_another_number_of_calls_than_with_the_example_is_refused() -> None:
    layers = captured_layers(record_model(OftenOrSeldom(), inputs(3)))
    for batch, error, message in (
        (5, GlueError, "was not called so often"),
        (1, RouteError, "for the model's output, but the plan does not send it there"),
    ):
        with (
            penstock.Pipeline(
                layers, partition=[1, 1, 1, 1], loss=nn.functional.mse_loss, threads_per_stage=1
            ) as pipe,
            pytest.raises(error, match=message),
        ):
            pipe.train_step(inputs(batch), inputs(batch))


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
    assert captured_layers(captured).parameter_counts() == (WIDTH * (WIDTH + 1),) * 3


class Lazy(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = nn.LazyLinear(WIDTH)


class ScriptedBlock(Chain):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():  # it is deprecated, and used all the same
            warnings.simplefilter("ignore")
            self.blocks[1] = torch.jit.script(nn.Linear(WIDTH, WIDTH))


class InThreads(Chain):
    def between(self, x: Tensor, _number: int) -> Tensor:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(x.tanh).result()


class BlocksInThreads(Chain):
    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as threads:
            first, second = threads.map(lambda block: block(x), self.blocks[:2])
        output: Tensor = self.blocks[2](first + second)
        return output


class WithOtherWeights(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            twice = {name: value * 2 for name, value in block.named_parameters()}
            x = torch.func.functional_call(block, twice, (x,))
        return x


class Unseen(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = nn.Linear.forward(block, x)  # type: ignore[arg-type]
        return x


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Unseen, r"calls none of its blocks, .* Call them as block\(x\)"),
        (Lazy, r"'blocks\.1' is lazy: .* Call the model once"),
        (ScriptedBlock, r"'blocks\.1' is a TorchScript module"),
        (InThreads, "given it to another thread"),
        (BlocksInThreads, r"for the input 'x' is used .* another thread.*threads work inside a"),
        (WithOtherWeights, r"'blocks\.0' is called with another tensor in place of its 'weight'"),
    ],
)
def test_what_cannot_be_run_in_stages_is_said_with_its_remedy(
    kind: type[Chain], message: str
) -> None:
    with pytest.raises((CutError, GlueError), match=message):
        record_model(kind(), inputs())


def test_a_value_that_a_hook_has_kept_says_what_it_is() -> None:
    model, kept = Chain(), []
    model.blocks[0].register_forward_hook(lambda _module, _inputs, output: kept.append(output))
    with pipeline(model) as pipe:
        pipe.eval_step(inputs())
    with pytest.raises(GlueError, match=r"output of 'blocks\.0' is used where .*keep="):
        kept[-1].sum()
