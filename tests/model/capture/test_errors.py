"""What cannot be cut is said before training, with the remedy."""

import copy
import random
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import CutError, GlueError, RouteError
from penstock.model.capture.captured import Captured, record_model
from penstock.model.capture.source import captured_layers
from penstock.model.capture.stages import CutModel
from penstock.model.capture.tied_weights import release
from tests.model.capture.any_models.chain import WIDTH, Chain, between, inputs, of_blocks
from tests.model.capture.any_models.lists import REFUSED
from tests.model.capture.any_models.odd import WithToken
from tests.model.capture.any_models.refused import Refused
from tests.model.capture.running import assert_trains_as_whole


class ByThread(Chain):  # goes another way on every thread, and so on every stage
    def between(self, x: Tensor, number: int) -> Tensor:
        other = number == 0 and threading.current_thread().name.endswith("-1")
        return x * 2 if other else x + 1


class DrawingInside(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


class Cache:  # an object in which a tensor could hide
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class WithCache(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x, Cache(x)


class UsesCache(Chain):
    kinds = (WithCache, nn.Linear, nn.Linear)

    def forward(self, x: Tensor) -> Tensor:
        x, cache = self.blocks[0](x)
        x = self.blocks[1](x)
        return self.blocks[2](x + cache.tensor)


def pipeline(model: nn.Module, **options: Any) -> penstock.Pipeline:
    told: dict[str, Any] = {"loss": nn.functional.mse_loss, "threads_per_stage": 1}
    told = {"num_microbatches": 1, "partition": [1, 1, 1], **told, **options}
    return penstock.Pipeline(captured_layers(record_model(model, inputs())), **told)


def test_too_few_blocks_are_named() -> None:
    with pytest.raises(CutError, match=r"4 stages asked, 3 block calls found: blocks\.0, blocks"):
        penstock.Pipeline(
            captured_layers(record_model(Chain(), inputs())), num_stages=4, num_microbatches=1
        )


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
    inside, state = of_blocks(nn.Linear, DrawingInside, nn.Linear), random.getstate()
    assert len(record_model(inside, inputs()).calls) == 3 and random.getstate() == state


def test_an_object_that_a_later_stage_might_use_is_a_warning() -> None:
    found = record_model(UsesCache(), inputs()).warnings
    assert any("returns a Cache" in warning for warning in found)


class LateHook(Chain):  # hooks on to the gradient of a value after another block has used it
    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        if first.requires_grad:
            first.register_hook(lambda gradient: gradient.clamp(max=0.1))
        return self.blocks[2](first + second)


def test_a_hook_on_a_gradient_may_be_set_without_looking() -> None:
    class Hooking(Chain):
        def between(self, x: Tensor, _number: int) -> Tensor:
            x.register_hook(lambda gradient: gradient * 2)
            return x

    assert_trains_as_whole(Hooking(), inputs(), check=False)


class NothingToDifferentiate(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class Shaking(torch.autograd.Function):  # draws where nobody can know
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand(len(x), 1)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Any:
        return gradient


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


class Tied(Chain):  # its last block has the weight of the first one, and uses it in a checkpoint
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = Checkpointed(WIDTH, WIDTH)
        self.blocks[2].weight = self.blocks[0].weight


class Checkpointed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return result


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (ByThread, GlueError, r"test_errors\.py"),  # another way on another stage
        (UsesCache, CutError, "gave a Cache, which a later"),
        (LateHook, CutError, "a part of the gradient"),  # that two stages add to
        (Tied, CutError, "read in a reentrant checkpoint"),
    ],
)
def test_what_only_a_step_shows_is_refused_then(kind: Any, error: Any, message: str) -> None:
    with pipeline(kind()) as pipe, pytest.raises(error, match=message):
        pipe.train_step(inputs(), inputs())


class Clamping(nn.Linear):  # keeps its weight small
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


class OftenOrSeldom(Chain):  # calls its last block as often as there are samples
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
        pipe = penstock.Pipeline(
            layers,
            partition=[1, 1, 1, 1],
            loss=nn.functional.mse_loss,
            threads_per_stage=1,
            num_microbatches=1,
        )
        with pipe, pytest.raises(error, match=message):
            pipe.train_step(inputs(batch), inputs(batch))


def test_the_models_own_mode_and_buffers_are_the_pipelines() -> None:
    model = WithToken()
    with pipeline(model) as pipe:
        assert pipe.state_dict().keys() == model.state_dict().keys()
        found = pipe.eval_step(inputs())
        assert model.training
        pipe.eval()
        assert not model.training and torch.equal(found, model(inputs()))
        pipe.double()
        assert model.offset.dtype == torch.float64


def test_a_capture_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    whole = nn.ModuleDict({"inner": model})
    whole.forward = model.forward
    model[1].eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
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


class Sizing(Chain):  # keeps the size of what it is given: the same one with the example as before
    size: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.size = len(x)
        for block in self.blocks:
            x = block(x) / self.size
        return x


class Forgetting(Sizing):  # leaves nothing that could be compared
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.size = None
        return x


class Telling(Chain):  # writes to its blocks before it calls them
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.size = len(x)  # type: ignore[assignment]  # no module, no tensor
        return super().forward(x)


class Gated(nn.Linear):  # keeps a tensor on itself while it runs
    gate: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.gate = x.mean(1, keepdim=True)
        return super().forward(x) * self.gate.sigmoid()


class Counted(nn.Linear):
    size = 0

    def forward(self, x: Tensor) -> Tensor:
        self.size = len(x)
        return super().forward(x) / self.size


KEEPING: dict[type[nn.Linear], str] = {Gated: "gate", Counted: "size"}


class Again(Chain):  # calls one block three times
    def __init__(self, kind: type[nn.Linear]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(WIDTH, WIDTH)] * 3)


class Seeding(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return super().forward(x) + torch.randn(WIDTH)


def scripted(width: int, _: int) -> nn.Module:
    with warnings.catch_warnings():  # it is deprecated, and used all the same
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(width, width))


def in_a_thread(_: Chain, x: Tensor, number: int) -> Tensor:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(x.tanh).result()


def forked(_: Chain, x: Tensor, number: int) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return x + torch.randn_like(x)


def restored(_: Chain, x: Tensor, number: int) -> Tensor:
    torch.set_rng_state(torch.get_rng_state())
    return x


def enclosing() -> Chain:
    kept: list[Tensor] = []

    def keeping(_: Chain, x: Tensor, number: int) -> Tensor:
        kept.append(x)
        return x + kept[number]

    return between(keeping)()


def without_values() -> Chain:
    """Make a model that branches on values, and has none."""
    with torch.device("meta"):
        return between(lambda _, x, number: x if x.sum().item() > 0 else -x)()


def after_a_run(make: Callable[[], Chain]) -> Callable[[], Chain]:
    """Run the model once: what it writes is then there already."""

    def made() -> Chain:
        model = make()
        model(inputs())
        return model

    return made


def with_hook() -> Chain:
    model = Chain()
    model.register_full_backward_hook(lambda *_: None)
    return model


LAZY = partial(of_blocks, nn.Linear, lambda n, _: nn.LazyLinear(n))
PLACED = between(lambda _, x, number: x if x.data_ptr() % 8 == 0 else x.clone())
SHAKEN = between(lambda _, x, number: Shaking.apply(x))
_ITSELF = "the model itself changes its 'size', and it is no block"
CANNOT: list[tuple[Callable[[], Chain], str, dict[str, Any]]] = [
    (Chain, r"no module of Chain is called 'layers\.\*'; there are", {"blocks": ["layers.*"]}),
    (Chain, r"'blocks' and 'blocks\.0' inside it", {"blocks": ["blocks", "blocks.*"]}),
    (Unseen, r"calls none of its blocks, .* Call them as block\(x\)", {}),
    (LAZY, r"'blocks\.1' is lazy: .* Call the model once", {}),
    (partial(of_blocks, nn.Linear, scripted), r"'blocks\.1' is a TorchScript module", {}),
    (between(in_a_thread), "given it to another thread", {}),
    (BlocksInThreads, "for the input 'x' is used .* another thread.*threads work inside a", {}),
    (WithOtherWeights, r"'blocks\.0' is called with another tensor in place of its 'weight'", {}),
    (without_values, r"asks for values at test_errors\.py", {}),
    (PLACED, "asks where in memory a routed value is", {}),
    (NothingToDifferentiate, "nothing that requires a grad", {}),
    (SHAKEN, r"'Shaking\.apply' draws random numbers between blocks", {}),
    (enclosing, "of another micro-batch is read", {}),
    (with_hook, "'Chain' has a hook on its gradients and holds several", {}),
    (after_a_run(Sizing), _ITSELF, {}),
    (after_a_run(Forgetting), _ITSELF, {}),
    (Telling, r"changes the 'size' of 'blocks\.0'", {}),
    *(
        (after_a_run(partial(Again, kind)), rf"3 calls of .* write '{name}' of 'blocks\.0'", {})
        for kind, name in KEEPING.items()
    ),
    *(
        (make, rf"torch's {name} \(.*test_errors\.py", {})
        for make, name in (
            (partial(of_blocks, nn.Linear, Seeding, nn.Linear), "manual_seed"),
            (between(forked), "fork_rng"),
            (between(restored), "set_rng_state"),
        )
    ),
]


@pytest.mark.parametrize(("make", "words", "options"), CANNOT)
def test_what_cannot_be_run_in_stages_is_said_with_its_remedy(make, words, options) -> None:
    before = torch.manual_seed, torch.random.fork_rng, nn.Module.__setattr__
    with pytest.raises((CutError, GlueError), match=words):
        record_model(make(), inputs(), **options)
    assert before == (torch.manual_seed, torch.random.fork_rng, nn.Module.__setattr__)


@pytest.mark.parametrize("kind", KEEPING)
def test_a_block_of_one_stage_may_keep_what_it_likes(kind: type[nn.Linear]) -> None:
    assert len(record_model(Again(kind), inputs(), together=["blocks.0"]).calls) == 3
    assert len(record_model(of_blocks(nn.Linear, kind, nn.Linear), inputs()).calls) == 3


def test_a_value_that_a_hook_has_kept_says_what_it_is() -> None:
    model, kept = Chain(), []
    model.blocks[0].register_forward_hook(lambda _module, _inputs, output: kept.append(output))
    with pipeline(model) as pipe:
        pipe.eval_step(inputs())
    with pytest.raises(GlueError, match=r"output of 'blocks\.0' is used where .*keep="):
        kept[-1].sum()


class CatchingAll(Chain):  # catches whatever a block raises, and goes on
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            try:
                x = block(x)
            except BaseException:
                x = x * 0
        return x


class CatchingTheLast(Chain):  # gives something else where a block raises
    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.blocks[2](self.blocks[1](self.blocks[0](x)))
        except BaseException:
            return torch.zeros(1)


def test_code_that_catches_everything_cannot_change_what_is_computed() -> None:
    assert_trains_as_whole(CatchingAll(), inputs(), check=False)
    pipe = pipeline(CatchingTheLast())
    with pipe, pytest.raises(CutError, match=r"caught the exception by which a stage leaves"):
        pipe.train_step(inputs(), inputs())


def test_a_model_that_is_compiled_as_a_whole_is_refused() -> None:
    compiled = Chain()
    compiled.compile(backend="eager")
    wrapped: Any = torch.compile(Chain(), backend="eager")
    for model in (compiled, wrapped):
        with pytest.raises(CutError, match=r"is compiled; give the model as it was"):
            penstock.capture(model, inputs())


def test_a_block_may_have_a_hook_on_its_gradients() -> None:
    model = Chain()
    model.blocks[1].register_full_backward_hook(lambda *_: None)
    record_model(model, inputs())


def test_a_parameter_that_only_another_stage_has_is_not_read_as_it_lies_there() -> None:
    class Sometimes(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.ones(WIDTH))

        def between(self, x: Tensor, number: int) -> Tensor:
            if number == 1 and x.shape[0] > 3:
                x = x.clone()
                x[0] = self.extra
            return x

    model = Sometimes()
    cut = CutModel(record_model(model, inputs(3)), (1, 2))
    first = cut.run_stage(0, ((inputs(4),), {}), {})
    release(model, cut.names_of(1))
    with pytest.raises(RouteError, match=r"the parameter 'extra' is read \(test_errors"):
        cut.run_stage(1, ((), {}), first.sent[1], first.told)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of what compiles
def test_blocks_may_be_compiled() -> None:
    class Transposed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T

    model = Chain()
    model.blocks = nn.ModuleList(Transposed(WIDTH, WIDTH) for _ in range(3))
    model.blocks[0].compile(backend="eager")
    compiled: Any = torch.compile(model.blocks[1], backend="eager")
    model.blocks[1] = compiled
    assert "to the bit" in str(penstock.capture(model, inputs()))


class KeptForGeneration(Chain):
    """Keeps a tensor that its training does not read, as Qwen2.5-VL of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.deltas: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.deltas is None or len(x):
            self.deltas = x.sum(1)
        return super().forward(x)


def test_what_only_generation_reads_can_be_forgotten_as_the_refusal_says() -> None:
    model = KeptForGeneration()
    with pytest.raises(CutError, match="and it is no block") as refusal:
        penstock.capture(model, inputs(4))
    exec(str(refusal.value).rpartition("forget it: ")[2], {"model": model})
    assert "are the model's, to the bit" in str(penstock.capture(model, inputs(4)))
