"""A backward in two parts gives the bits of one, in what is sent and in `.grad`."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import StateError
from penstock.model.entries import make_entry
from penstock.runtime.run import Run
from penstock.runtime.stage.stage import Stage
from penstock.runtime.stage.state import BackwardState
from penstock.runtime.stage.tape import Tape
from penstock.torch_private import TorchDispatchMode, without_torch_function
from tests.every_schedule import divided
from tests.laws.test_equality_or_refusal import model
from tests.models import ALL_MODELS, Model
from tests.side_by_side import assert_trains_like_unsplit, same_bits

Make = Callable[[], nn.Module]


def tape_of(module: nn.Module, x: Tensor, *, wants_grad: bool = True) -> Tape:
    """Run a module forward on what came into a stage."""
    tape = Tape(0, {}, graph_dropped=False)
    tape.entries[0] = [make_entry(x, wants_grad and x.is_floating_point())]
    found = module(tape.entry_tensors[0])
    tape.output = list(found) if isinstance(found, tuple) else [found]
    return tape


def roots_of(tape: Tape) -> tuple[list[Tensor], list[Tensor]]:
    """Return all outputs that have a graph, each with a gradient of its own."""
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in tape.output]
    live = [(t, g) for t, g in zip(tape.output, gradients, strict=True) if t.requires_grad]
    return [root for root, _ in live], [gradient for _, gradient in live]


def batches(shape: tuple[int, ...] = (4, 6)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


def in_two_parts(module: nn.Module, inputs: list[Tensor], *, wants_grad: bool) -> list[Tape]:
    """Run all input backwards, and then all weight backwards."""
    tapes = [tape_of(module, x, wants_grad=wants_grad) for x in inputs]
    for tape in tapes:
        roots, gradients = roots_of(tape)
        if roots:
            tape.divide(roots)
            tape.backward(roots, gradients)
    if all(tape.parts is not None for tape in tapes):
        assert all(p.grad is None for p in module.parameters())
    for tape in tapes:
        tape.backward_weight()
    return tapes


class Calling(nn.Module):
    """Calls a function with itself and the input; the layers in it are there to be used."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def calling(function: Callable[[Any, Tensor], Any], **layers: Make) -> Make:
    return lambda: Calling(function, **{name: make() for name, make in layers.items()})


def linear() -> nn.Module:
    return nn.Linear(6, 6)


def hooked(register: Callable[[nn.Linear], object]) -> Make:
    def make() -> nn.Module:
        layer = nn.Linear(6, 6)
        register(layer)
        return nn.Sequential(nn.Linear(6, 6), layer, nn.Tanh())

    return make


def frozen(name: str) -> Make:
    def make() -> nn.Module:
        stack = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        stack.get_parameter(name).requires_grad_(False)
        return stack

    return make


def hooking_result(m: Any, x: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    y: Tensor = m.a(x)
    y.register_hook(hook)
    return y.tanh()


def double_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 2


def double_gradients(module: nn.Module, gradients: Any, _: Any) -> Any:
    return tuple(gradient * 2 for gradient in gradients)


def hooking_node(m: Any, x: Tensor, *, before: bool) -> Tensor:
    y: Tensor = m.a(x)
    assert y.grad_fn is not None
    if before:
        y.grad_fn.register_prehook(doubled)
    else:
        y.grad_fn.register_hook(lambda gradients, _: doubled(gradients))
    return y.tanh()


def doubled(gradients: Any) -> Any:
    return tuple(None if gradient is None else gradient * 2 for gradient in gradients)


class _Doubling(Tensor):
    """A tensor whose products are twice as large, until autograd has them."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        with without_torch_function():
            return result * 2 if func is Tensor.mm else result


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient * weight, gradient * x


MODULES: dict[str, Make] = {
    "a weight used twice": calling(lambda m, x: m.a(m.a(x).tanh()), a=linear),
    "a weight used three times": calling(lambda m, x: m.a(m.a(m.a(x).tanh())), a=linear),
    "a weight used by other operators": calling(
        lambda m, x: (
            F.conv1d(x[:, None], m.a.weight[:, :, None].mean(1, keepdim=True)).sum(1)
            + x.mm(m.a.weight)
            + F.linear(m.a(x), m.a.weight)
        ),
        a=linear,
    ),
    "a weight and its transpose": calling(lambda m, x: m.a(x).mm(m.a.weight), a=linear),
    "a weight with an exponential": calling(lambda m, x: x.mm(m.a.weight.exp()), a=linear),
    "a weight from a network": calling(lambda m, x: x.mm(m.a(m.b.weight)), a=linear, b=linear),
    "a weight normed": lambda: parametrizations.weight_norm(nn.Linear(6, 6)),
    "an input that is its own weight": calling(lambda m, x: m.a(x).mm(x.t()).mm(x), a=linear),
    "an input that is a weight alone": calling(lambda m, x: m.a.weight.mm(x.t()), a=linear),
    "a scaled product": calling(
        lambda m, x: torch.addmm(m.a.bias, x, m.a.weight, alpha=0.3, beta=2), a=linear
    ),
    "a bias for rows": calling(
        lambda m, x: torch.addmm(m.a.weight[:4, :1], x, m.a.weight), a=linear
    ),
    "a bias of two dimensions": calling(
        lambda m, x: torch.addmm(m.a.bias[None], x, m.a.weight), a=linear
    ),
    "a complex product": calling(
        lambda m, x: torch.view_as_real(torch.complex(x, 2 * x).mm(m.a.weight.cfloat())), a=linear
    ),
    "an input of a class of its own": calling(
        lambda m, x: m.a(x).as_subclass(_Doubling).mm(m.b.weight.t()), a=linear, b=linear
    ),
    "a gradient of a class of its own": calling(
        partial(hooking_result, hook=lambda gradient: gradient.as_subclass(_Doubling)), a=linear
    ),
    "a product of batches": calling(
        lambda m, x: torch.einsum("etd,edf->etf", x.view(2, 2, 6), m.a.weight.view(2, 3, 6).mT),
        a=linear,
    ),
    "frozen weight": frozen("2.weight"),
    "frozen bias": frozen("2.bias"),
    "in place": lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)),
    "a function of its own": calling(lambda m, x: m.a(_Doubled.apply(x, m.a.bias)), a=linear),
    "a hook on a weight": hooked(lambda a: a.weight.register_hook(lambda g: g * 2)),
    "a hook after accumulation": hooked(
        lambda a: a.weight.register_post_accumulate_grad_hook(double_gradient)
    ),
    "a hook on a module": hooked(lambda a: a.register_full_backward_hook(double_gradients)),
    "a hook on a result": calling(partial(hooking_result, hook=lambda g: g * 2), a=linear),
    "a hook before a node": calling(partial(hooking_node, before=True), a=linear),
    "a hook after a node": calling(partial(hooking_node, before=False), a=linear),
    "a checkpoint": calling(
        lambda m, x: checkpoint(lambda v: m.a(v.tanh()), m.b(x), use_reentrant=False),
        a=linear,
        b=linear,
    ),
    "several results": calling(lambda m, x: (m.a(x), m.b(m.a(x))), a=linear, b=linear),
    "a weight that is sent": calling(lambda m, x: (m.a(x), m.a.weight), a=linear),
    "an input that is passed on": calling(lambda m, x: (m.a(x), x), a=linear),
    "an unused weight": calling(lambda m, x: m.a(x), a=linear, b=linear),
    "no weights": nn.Tanh,
    "a sparse gradient": calling(
        lambda m, x: torch.gather(
            x.mm(m.a.weight.t()), 1, torch.tensor([[1], [2], [1], [0]]), sparse_grad=True
        ),
        a=linear,
    ),
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0, batch_first=True),
    "lstm": calling(lambda m, x: m.a(x)[0], a=lambda: nn.LSTM(6, 6)),
    "bilinear": calling(lambda m, x: m.a(x, x), a=lambda: nn.Bilinear(6, 6, 6)),
}
IMAGES: dict[str, Make] = {
    "plain": lambda: nn.Conv2d(4, 4, 3),
    "grouped": lambda: nn.Conv2d(4, 8, 3, groups=2, bias=False),
    "strided": lambda: nn.Conv2d(4, 4, 3, stride=2, padding=1, dilation=2),
    "transposed": lambda: nn.ConvTranspose2d(4, 4, 3, stride=2, output_padding=1),
    "twice": calling(lambda m, x: m.a(m.a(x)), a=lambda: nn.Conv2d(4, 4, 3, padding=1)),
    "double": lambda: nn.Conv2d(4, 4, 3).double(),
    "norms": lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3), nn.PReLU()),
}
TOKENS: dict[str, Make] = {
    "padded": lambda: nn.Embedding(6, 4, padding_idx=2),
    "by frequency": lambda: nn.Embedding(6, 4, scale_grad_by_freq=True),
    "sparse": lambda: nn.Embedding(6, 4, sparse=True),
    "tied": calling(lambda m, x: F.linear(m.a(x), m.a.weight), a=lambda: nn.Embedding(6, 4)),
    "tied three times": calling(
        lambda m, x: F.linear(m.a(x) + m.a(x.flip(0)), m.a.weight), a=lambda: nn.Embedding(6, 4)
    ),
}
CASES = [
    *(pytest.param(make, batches(), id=name) for name, make in MODULES.items()),
    *(pytest.param(make, batches((2, 4, 7, 7)), id=name) for name, make in IMAGES.items()),
    *(
        pytest.param(make, [torch.randint(6, (3, 5)) for _ in range(3)], id=name)
        for name, make in TOKENS.items()
    ),
]


@pytest.mark.parametrize("wants_grad", (True, False), ids=("inner", "first"))
@pytest.mark.parametrize("make, inputs", CASES)
def test_two_parts_give_the_bits_of_one(
    make: Make, inputs: list[Tensor], wants_grad: bool
) -> None:
    assert_parts_equal_whole(make, inputs, wants_grad=wants_grad)


def assert_parts_equal_whole(make: Make, inputs: list[Tensor], *, wants_grad: bool) -> None:
    torch.manual_seed(0)
    whole, parts = make(), make()
    parts.load_state_dict(whole.state_dict())
    dtype = next((p.dtype for p in whole.parameters()), torch.float32)
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    expected = []
    for x in inputs:
        tape = tape_of(whole, x, wants_grad=wants_grad)
        roots, gradients = roots_of(tape)
        if roots:
            tape.backward(roots, gradients)
        expected.append(tape.entries[0][0].gradient)
    tapes = in_two_parts(parts, inputs, wants_grad=wants_grad)
    for tape, wanted in zip(tapes, expected, strict=True):
        entry = tape.entries[0][0]
        assert same_bits(entry.gradient, wanted)
        assert len(entry.caught) <= 1
    for (name, a), b in zip(whole.named_parameters(), parts.parameters(), strict=True):
        ours, wanted = (g.to_dense() if g is not None else None for g in (b.grad, a.grad))
        assert same_bits(ours, wanted), name


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("make", "x", "operator"),
    [
        (linear, torch.ones(2, 6), "aten.mm.default"),
        (lambda: nn.Linear(6, 6, bias=False), torch.ones(2, 6), "aten.mm.default"),
        (lambda: nn.Conv1d(2, 2, 3), torch.ones(1, 2, 5), "aten.convolution_backward.default"),
        (
            lambda: nn.Embedding(3, 2),
            torch.tensor([0, 2]),
            "aten.embedding_dense_backward.default",
        ),
    ],
)
def test_the_gradient_of_a_weight_is_computed_in_the_second_part(
    make: Make, x: Tensor, operator: str
) -> None:
    module = make()
    tape = tape_of(module, x)
    roots, gradients = roots_of(tape)
    with Operators() as first:
        tape.divide(roots)
        tape.backward(roots, gradients)
    with Operators() as second:
        tape.backward_weight()
    assert first.names.count(operator) == int(x.is_floating_point())
    assert second.names.count(operator) == 1


def test_between_the_parts_only_what_the_weights_need_is_kept() -> None:
    kept = []

    def see(_: Any, x: Tensor) -> Tensor:
        kept.append(weakref.ref(x.untyped_storage()))
        return x * x

    seen = Calling(see)
    stack = nn.Sequential(nn.Tanh(), seen, nn.Tanh(), linear(), seen, nn.Tanh())
    stack[3].register_forward_pre_hook(
        lambda _, inputs: kept.append(weakref.ref(inputs[0].untyped_storage()))
    )
    tape = tape_of(stack, torch.ones(2, 6))
    roots, gradients = roots_of(tape)
    tape.divide(roots)
    tape.backward(roots, gradients)
    graph = tape.output[0]  # as a layer may keep it
    tape.drop_graph()
    assert [ref() is not None for ref in kept] == [False, True, False]
    tape.backward_weight()
    assert [ref() is not None for ref in kept] == [False, False, False]
    assert graph.grad_fn is not None


def test_a_hook_of_a_weight_runs_once() -> None:
    calls = []
    layer = nn.Linear(6, 6)
    layer.weight.register_hook(lambda _: calls.append("gradient"))
    layer.weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    module = Calling(lambda m, x: m.a(m.a(x)), a=layer)
    in_two_parts(module, [torch.ones(2, 6)], wants_grad=True)
    assert calls == ["gradient", "accumulated"]


def test_a_checkpoint_runs_again_once() -> None:
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(1)
        y: Tensor = module.get_submodule("a")(x)
        return y

    module = Calling(lambda m, x: checkpoint(function, x, use_reentrant=False), a=linear())
    in_two_parts(module, [torch.ones(2, 6)], wants_grad=True)
    assert len(calls) == 2


@pytest.mark.parametrize(
    "make",
    [
        calling(lambda m, x: checkpoint(m.a, m.b(x), use_reentrant=True), a=linear, b=linear),
        lambda: nn.Sequential(hook_of_norm(nn.LayerNorm(6)), nn.Linear(6, 6)),
        lambda: nn.LayerNorm(6),
        calling(lambda m, x: m.a(x.as_subclass(_Doubling)), a=lambda: nn.Linear(6, 6, bias=False)),
    ],
    ids=[
        "a checkpoint that runs a backward",
        "a hook of a weight that is not cut",
        "no heavy operator",
        "a class of its own",
    ],
)
def test_what_cannot_be_split_is_done_whole_in_the_first_part(make: Make) -> None:
    torch.manual_seed(0)
    module = make()
    tape = tape_of(module, torch.randn(2, 6))
    roots, gradients = roots_of(tape)
    tape.divide(roots)
    assert tape.parts is None
    tape.backward(roots, gradients)
    found = [p.grad for p in module.parameters()]
    assert all(g is not None for g in found)
    tape.backward_weight()
    assert all(p.grad is g for p, g in zip(module.parameters(), found, strict=True))


def hook_of_norm(norm: nn.LayerNorm) -> nn.Module:
    norm.weight.register_hook(lambda g: g * 2)
    return norm


class _Adding(torch.autograd.Function):
    """Adds to the gradient of a weight by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        y: Tensor = layer(x)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.layer(x).backward(gradient)
        return x.grad, None


def test_a_function_that_adds_to_a_weight_by_itself_is_refused() -> None:
    module = Calling(lambda m, x: _Adding.apply(m.a(x), m.a), a=linear())
    with pytest.raises(StateError, match=r"added to the \.grad of a parameter"):
        in_two_parts(module, [torch.ones(2, 6)], wants_grad=True)


def in_a_buffer(module: nn.Module) -> Tensor:
    """Let the gradients of a module be parts of one buffer; give the rest of it."""
    sizes = [p.numel() for p in module.parameters()]
    *parts, rest = torch.zeros(sum(sizes) + 5).split([*sizes, 5])
    for parameter, part in zip(module.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)
    return rest


class _AddingTo(torch.autograd.Function):
    """Adds to some memory, as the thread of another stage may at that time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: list[Tensor]) -> Tensor:
        ctx.memory = memory
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        for tensor in ctx.memory:
            tensor.add_(1)
        return gradient, None


def test_gradients_in_one_buffer_count_changes_together_and_are_no_changes_of_a_weight() -> None:
    rest: list[Tensor] = []
    module = Calling(lambda m, x: m.b(_AddingTo.apply(m.a(x), rest)), a=linear(), b=linear())
    rest.append(in_a_buffer(module))
    tape = tape_of(module, torch.ones(2, 6))
    roots, gradients = roots_of(tape)
    tape.divide(roots)
    assert tape.parts is not None
    tape.backward(roots, gradients)
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())
    tape.backward_weight()
    assert all(p.grad is not None and p.grad.any() for p in module.parameters())


def test_a_function_that_adds_to_a_weights_part_of_a_buffer_is_refused() -> None:
    module = Calling(lambda m, x: _Adding.apply(m.a(x), m.a), a=linear())
    in_a_buffer(module)
    tape = tape_of(module, torch.ones(2, 6))
    roots, gradients = roots_of(tape)
    tape.divide(roots)
    with pytest.raises(StateError, match=r"added to the \.grad of a parameter"):
        tape.backward(roots, gradients)


class _Overwriting(torch.autograd.Function):
    """Changes the gradient that it is given, which others read too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mul_(2)


def overwriting(m: Any, x: Tensor) -> Tensor:
    other = m.b(x)
    y: Tensor = m.c(_Overwriting.apply(other) + m.a(x))  # `a` is given the gradient first
    return y


def test_a_gradient_that_a_function_overwrites_is_refused_or_was_used_before() -> None:
    make = calling(overwriting, a=linear, b=linear, c=linear)
    assert_parts_equal_whole(make, batches(), wants_grad=False)
    with pytest.raises(StateError, match="changed in place since the input backward"):
        in_two_parts(make(), batches(), wants_grad=True)


def test_a_value_that_changes_between_the_parts_is_refused() -> None:
    module = nn.Sequential(linear(), nn.Tanh(), linear())
    x = torch.ones(2, 6)
    tape = tape_of(module, x)
    roots, gradients = roots_of(tape)
    tape.divide(roots)
    tape.backward(roots, gradients)
    x += 1
    with pytest.raises(StateError, match="changed in place since the input backward"):
        tape.backward_weight()


# -- stages -----------------------------------------------------------------------------------


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each stage run its backwards in parts: all weight backwards after the last input one."""

    def backward(stage: Stage, run: Run, microbatch: int) -> None:
        stage.backward_input(run, microbatch)
        tape = run.stages[stage.index].tapes[microbatch]
        assert tape.inputs == tape.entry_tensors == tape.results == []
        if microbatch == len(run.batch.sizes) - 1:
            for earlier in range(len(run.batch.sizes)):
                stage.backward_weight(run, earlier)

    monkeypatch.setattr(Stage, "backward", backward)


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize(
    "model, recompute", list(zip(ALL_MODELS, cycle(penstock.Recompute), strict=False)), ids=repr
)
def test_stages_in_two_parts_train_as_unsplit(model: Model, recompute: penstock.Recompute) -> None:
    assert_trains_like_unsplit(
        model,
        4 * model.min_samples,
        num_stages=2,
        num_microbatches=3 if model.min_samples == 1 else 4,
        recompute=recompute,
        transport=penstock.Transport.LOOPBACK,
        steps=2,
        bf16=recompute is penstock.Recompute.NEVER,
    )


class Sometimes(nn.Module):
    """A checkpoint that only some micro-batches run, with a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        if float(x.detach().sum()) > 0:
            return checkpoint(self.linear, x, use_reentrant=True)
        return self.linear(x)


@pytest.mark.usefixtures("in_parts")
def test_weights_add_up_in_order_where_only_some_micro_batches_can_be_split() -> None:
    made = model(lambda: [nn.Linear(6, 6), Sometimes(), nn.Linear(6, 3)])
    assert_trains_like_unsplit(
        made,
        16,
        num_stages=1,
        num_microbatches=8,
        recompute=penstock.Recompute.NEVER,
        transport=penstock.Transport.LOOPBACK,
    )


@pytest.mark.usefixtures("in_parts")
def test_state_is_watched_in_both_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []

    @contextmanager
    def noting(state: BackwardState, run: Run, tape: Tape) -> Iterator[None]:
        notes.append(f"begin {tape.microbatch}")
        yield
        notes.append(f"end {tape.microbatch}")

    monkeypatch.setattr(BackwardState, "around_backward", noting)
    monkeypatch.setattr(BackwardState, "is_idle", False)
    with penstock.Pipeline(
        [nn.Linear(6, 6)], num_stages=1, num_microbatches=2, loss=F.mse_loss
    ) as pipe:
        pipe.train_step(torch.ones(2, 6), torch.ones(2, 6))
    assert notes == [f"{what} {i}" for i in (0, 1) for what in ("begin", "end")] * 2


class Alive(TorchDispatchMode):
    """Knows which storages that operators made are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            if isinstance(each, Tensor) and each.dim() > 0:  # losses are kept for the caller
                self.made.append(weakref.ref(each.untyped_storage()))
        return found

    def num_bytes(self, *others: Tensor | None) -> int:
        """Count the bytes that are alive, of others not."""
        found = {s.data_ptr(): s.nbytes() for ref in self.made if (s := ref()) is not None}
        for tensor in others:
            if tensor is not None:
                found.pop(tensor.untyped_storage().data_ptr(), None)
        return sum(found.values())


def test_what_waits_between_the_parts_is_counted_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )
    counted, alive = [], []
    backward_input = Stage.backward_input
    view_bytes = 2 * 6 * 4  # of the caller's batch, for each micro-batch

    def counting(stage: Stage, run: Run, microbatch: int) -> None:
        backward_input(stage, run, microbatch)
        counted.append(run.recorded.memory[-1].kept_bytes)
        waiting = len(run.stages[stage.index].tapes)
        others = [t for p in layers.parameters() for t in (p, p.grad)]
        alive.append(mode.num_bytes(*others, x, target) + waiting * view_bytes)

    monkeypatch.setattr(Stage, "backward_input", counting)
    x, target = torch.randn(6, 6), torch.randn(6, 3)
    with (
        penstock.Pipeline(
            layers,
            num_stages=1,
            num_microbatches=3,
            loss=F.mse_loss,
            schedule=divided,
            transport=penstock.Transport.LOOPBACK,
            trace=penstock.Trace.MEMORY,
        ) as pipe,
        Alive() as mode,
    ):
        pipe.train_step(x, target)  # which copies what layers might change
        counted.clear()
        alive.clear()
        pipe.train_step(x, target)
        assert pipe.last_timeline is not None
        assert pipe.last_timeline.memory[-1].kept_bytes == 0
    assert counted == alive
    assert 0 < counted[0] < counted[1] == counted[2]
