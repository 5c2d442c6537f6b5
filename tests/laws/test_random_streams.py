"""Random numbers depend on (seed, step, layer, micro-batch) and on nothing else."""

import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.runtime.random.streams import WatchDraws
from penstock.torch_private import dispatch_modes
from tests.model_parts import Checkpointed, Does
from tests.models import BY_NAME, Model, vectors
from tests.reference import Unsplit, chain, stream_key
from tests.side_by_side import assert_trains_like_unsplit, differences, pipeline, same_bits
from tests.ways import WAYS, in_pairs, one_each


def _attend(x: Tensor) -> Tensor:
    heads = x.view(-1, 1, 4, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.4).reshape(x.shape)


DRAWS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.4),
    "dropout in place": lambda: nn.Dropout(0.4, inplace=True),
    "dropout1d": lambda: Does(lambda x: F.dropout1d(x.view(-1, 4, 2), 0.4).reshape(x.shape)),
    "alpha dropout": lambda: nn.AlphaDropout(0.4),
    "feature alpha dropout": lambda: nn.FeatureAlphaDropout(0.4),
    "rrelu": lambda: nn.RReLU(),
    "rrelu in place": lambda: nn.RReLU(inplace=True),
    "attention": lambda: Does(_attend),
    "rand": lambda: Does(lambda x: x * torch.rand(x.shape)),
    "rand_like": lambda: Does(lambda x: x * torch.rand_like(x)),
    "randn": lambda: Does(lambda x: x + torch.randn(8)),
    "randn_like": lambda: Does(lambda x: x + torch.randn_like(x)),
    "randint": lambda: Does(lambda x: x * torch.randint(1, 4, x.shape)),
    "randint_like": lambda: Does(lambda x: x * torch.randint_like(x, 1, 4)),
    "randperm": lambda: Does(lambda x: x[:, torch.randperm(8)]),
    "bernoulli": lambda: Does(lambda x: x * torch.bernoulli(torch.full_like(x, 0.5))),
    "bernoulli_": lambda: Does(lambda x: x * torch.empty_like(x).bernoulli_(0.5)),
    "normal": lambda: Does(lambda x: x + torch.normal(0.0, 1.0, x.shape)),
    "normal of tensors": lambda: Does(lambda x: torch.normal(x.detach(), 1.0) + x),
    "normal_": lambda: Does(lambda x: x + torch.empty_like(x).normal_()),
    "uniform_": lambda: Does(lambda x: x * torch.empty_like(x).uniform_(1, 2)),
    "exponential_": lambda: Does(lambda x: x * torch.empty_like(x).exponential_()),
    "geometric_": lambda: Does(lambda x: x * torch.empty_like(x).geometric_(0.5)),
    "random_": lambda: Does(lambda x: x * torch.empty(8).random_(3)),
    "multinomial": lambda: Does(lambda x: x * torch.multinomial(x.detach().abs() + 0.1, 1)),
    "poisson": lambda: Does(lambda x: x * torch.poisson(torch.full_like(x, 2.0))),
    "gumbel softmax": lambda: Does(lambda x: F.gumbel_softmax(x, hard=True)),
    "distribution": lambda: Does(lambda x: torch.distributions.Normal(x, 1.0).rsample()),
    "gamma": lambda: Does(lambda x: torch.distributions.Gamma(x.exp(), 1.0).rsample()),
    "branch": lambda: Does(lambda x: x * 2 if bool(torch.rand(()) < 0.5) else F.dropout(x, 0.3)),
    "python's random": lambda: Does(lambda x: x * random.uniform(0.5, 1.5)),
    "numpy": lambda: Does(lambda x: x * torch.from_numpy(np.random.rand(8)).float()),
    "numpy, one spare": lambda: Does(lambda x: x * float(np.random.randn()) + random.gauss()),
    "numpy and torch": lambda: Does(lambda x: F.dropout(x * float(np.random.rand()), 0.4)),
    "fractional pooling": lambda: Does(
        lambda x: F.fractional_max_pool2d(
            x.view(-1, 1, 4, 2).repeat(1, 1, 2, 4), 2, (4, 2)
        ).reshape(x.shape)
    ),
}


@pytest.mark.parametrize(
    ("names", "way"),
    one_each(
        [pytest.param([*DRAWS][n::7], id=" and ".join([*DRAWS][n::7])) for n in range(7)], WAYS
    ),
)
def test_every_way_to_draw_equals_the_unsplit_model(names: list[str], way: Any) -> None:
    """Five ways to draw in one model, each in two layers."""

    def layers() -> list[Any]:
        draws = [layer for name in 2 * names for layer in (DRAWS[name](), nn.Linear(8, 8))]
        return [nn.Linear(6, 8), *draws, nn.Linear(8, 3)]

    model = Model("draw", layers, vectors, F.mse_loss)
    assert_trains_like_unsplit(model, 5, num_stages=3, num_microbatches=2, **way)


@pytest.mark.parametrize("way", WAYS)
def test_recurrent_dropout_equals_the_unsplit_model(way: dict[str, Any]) -> None:
    def layers() -> list[Any]:
        first = nn.GRU(4, 8, num_layers=2, dropout=0.4, batch_first=True)
        second = nn.RNN(8, 3, num_layers=2, dropout=0.4, batch_first=True)
        pick = Does(lambda values: values[0])
        return [first, pick, nn.Linear(8, 8), second, pick]

    def batch(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 5, 4, generator=g), torch.randn(n, 5, 3, generator=g)

    model = Model("recurrent", layers, batch, lambda output, target: F.mse_loss(output, target))
    assert_trains_like_unsplit(model, 5, partition=(2, 1, 2), num_microbatches=2, **way)


def test_masks_are_those_of_the_key() -> None:
    expected = []
    for i in range(3):
        x = torch.ones(2, 50)
        for layer, rate in enumerate((0.5, 0.1, 0.1)):
            torch.default_generator.manual_seed(stream_key(7, 4, layer, i))
            x = F.dropout(x, rate)
        expected.append(x)
    layers = [nn.Dropout(0.5), nn.Dropout(0.1), nn.Dropout(0.1), nn.Identity()]
    with penstock.Pipeline(layers, 2, num_microbatches=3, seed=7, threads_per_stage=1) as pipe:
        pipe.step = 4
        assert torch.equal(pipe(torch.ones(6, 50)), torch.cat(expected))


@pytest.mark.parametrize("way", WAYS)
def test_training_and_evaluation_leave_all_global_generators_alone(way: dict[str, Any]) -> None:
    random.seed(5)
    np.random.seed(5)
    np.random.randn()  # leaves a spare number behind, which is state too
    expected = random.Random(5).random(), np.random.RandomState(5).randn(2)[1]
    before = torch.get_rng_state()

    def layers() -> list[Any]:
        return [Does(_outside), nn.Dropout(0.2), Does(_outside), nn.Linear(6, 3)]

    outside = Model("outside", layers, vectors, F.mse_loss)
    for model in (outside, BY_NAME["randomness"], BY_NAME["transformer"], BY_NAME["lstm"]):
        built, [(x, y)] = model.build(), model.batches(5, count=1)
        torch.set_rng_state(before)
        with pipeline(model, built, num_stages=3, num_microbatches=2, **way) as pipe:
            for _ in range(2):
                pipe.train_step(x, y)
                pipe.eval_step(x)
        assert torch.equal(torch.get_rng_state(), before)
    assert (random.random(), np.random.randn()) == expected


def _outside(x: Tensor) -> Tensor:
    return x * random.uniform(0.5, 1.5) + float(np.random.randn())


class Switched(nn.Module):  # draw only while switched on
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.on, self.draw = False, draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x) if self.on else x


LATE: dict[str, Callable[[Tensor], Tensor]] = {"torch": F.dropout, "python and numpy": _outside}


@contextmanager
def another_thread() -> Iterator[None]:
    """Let a thread run that is not Penstock's, and does nothing."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def step_and_warnings(
    pipe: penstock.Pipeline, batch: tuple[Any, ...]
) -> tuple[Tensor | None, list[warnings.WarningMessage]]:
    """Train for one step; its loss is None where a draw was refused."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.filterwarnings("always", message="Python's or NumPy's global generator")
        try:
            return pipe.train_step(*batch), warned
        except penstock.errors.RandomnessError:
            return None, warned


@pytest.mark.parametrize("draw, way, others", in_pairs(LATE, WAYS, (nullcontext, another_thread)))
def test_a_layer_that_starts_to_draw_later_is_right_or_told_once(draw, way, others) -> None:
    model = Model(
        "late",
        lambda: [nn.Linear(6, 6), Switched(LATE[draw]), nn.Linear(6, 3)],
        vectors,
        F.mse_loss,
    )
    built, twin = model.build(), model.build()
    unsplit, told = Unsplit(twin.modules, chain(3), 2), []
    with others(), pipeline(model, built, num_stages=3, num_microbatches=2, **way) as pipe:
        for n, batch in enumerate(model.batches(4, count=6)):
            for module in (built.modules[1], twin.modules[1]):
                assert isinstance(module, Switched)
                module.on = n in (2, 3, 5)
            expected = unsplit.train_step(*batch, model.loss)
            loss, warned = step_and_warnings(pipe, batch)
            if loss is None or warned:
                told.append(n)
            else:
                assert same_bits(loss, expected)
                assert not differences(built.modules, twin.modules)
            for module in (*built.modules, *twin.modules):
                module.zero_grad()
    assert told in ([], [2])


def test_a_draw_outside_torch_by_a_thread_of_the_users_own_is_a_warning() -> None:
    asked, drawn, done = threading.Event(), threading.Event(), threading.Event()

    def prepare() -> None:
        asked.wait(30)
        random.random()
        drawn.set()
        done.wait(30)

    def layer(x: Tensor) -> Tensor:
        asked.set()
        assert drawn.wait(30)
        return x

    thread = threading.Thread(target=prepare, daemon=True)
    thread.start()
    late = Switched(layer)
    model = Model("data", lambda: [nn.Linear(6, 6), late, nn.Linear(6, 3)], vectors, F.mse_loss)
    first, second = model.batches(4, count=2)
    with pipeline(model, model.build(), num_stages=3, num_microbatches=2) as pipe:
        pipe.train_step(*first)
        late.on = True
        with pytest.warns(UserWarning, match="another thread"):
            pipe.train_step(*second)
    done.set()
    thread.join()


def checkpointed(reentrant: bool, draw: Callable[[Tensor], Tensor] = F.dropout) -> nn.Module:
    return Checkpointed(nn.Sequential(nn.Linear(6, 6), Does(draw)), reentrant=reentrant)


@pytest.mark.parametrize("way, reentrant", one_each(WAYS, (True, False)))
def test_draws_outside_torch_in_a_users_own_checkpoint_are_refused(reentrant, way) -> None:
    """Torch's checkpoint draws others in the backward, and gives another gradient."""

    def noisy_outside(x: Tensor) -> Tensor:
        return x * torch.full_like(x, random.uniform(0.5, 1.5) + float(np.random.randn()))

    def layers() -> list[Any]:
        middle = checkpointed(reentrant, noisy_outside)
        return [nn.Linear(6, 6), middle, nn.Linear(6, 3)]

    model = Model("checkpoint", layers, vectors, F.mse_loss)
    with pipeline(model, model.build(), num_stages=3, num_microbatches=2, **way) as pipe:
        for batch in model.batches(5, count=4):
            with pytest.raises(penstock.errors.RandomnessError, match=r"No checkpoint keeps"):
                pipe.train_step(*batch)


@pytest.mark.parametrize(
    "draw", (_outside, lambda x: F.dropout(x, 0.5)), ids=("outside", "stays on")
)
def test_draws_in_evaluation_do_not_depend_on_the_number_of_stages(draw: Any) -> None:
    layers = [Does(draw), nn.Identity(), Does(draw)]
    found = []
    for num_stages in (1, 2, 3):
        with penstock.Pipeline(
            layers, num_stages=num_stages, num_microbatches=3, threads_per_stage=1
        ) as pipe:
            found.append(pipe.eval_step(torch.ones(7, 20)))
    assert all(torch.equal(output, found[0]) for output in found)
    assert not torch.equal(found[0], torch.ones(7, 20))


class OwnGenerator(nn.Module):  # draw from a generator of the user's own, which knows of no keys
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.generator)


@pytest.mark.parametrize("way", WAYS)
def test_a_generator_of_the_users_own_is_right_or_refused(way: dict[str, Any]) -> None:
    def layers() -> list[Any]:
        return [nn.Linear(6, 6), OwnGenerator(), nn.Linear(6, 3)]

    model = Model("own generator", layers, vectors, F.mse_loss)
    try:
        assert_trains_like_unsplit(model, 5, partition=(1, 1, 1), num_microbatches=2, **way)
    except penstock.errors.PenstockError as error:
        assert "generator" in str(error)


@torch.library.custom_op("penstock_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    """Draw inside an operator, where a dispatch mode does not see it."""
    return x + torch.rand(x.shape)


noisy.register_autograd(lambda ctx, gradient: gradient)


@torch.library.custom_op("penstock_tests::noisy_backward", mutates_args=())
def noisy_backward(x: Tensor) -> Tensor:
    return x * torch.rand(x.shape)


noisy_backward.register_autograd(lambda ctx, gradient: gradient * torch.rand(gradient.shape))


_library = torch.library.Library("penstock_tests", "FRAGMENT")
_library.define("noise_like(Tensor x) -> Tensor")
_library.impl("noise_like", lambda x: torch.rand(x.shape), "CPU")


def low_level(x: Tensor) -> Tensor:
    """Draw in an operator that was registered without `custom_op`, as those in C++ are."""
    noise: Tensor = torch.ops.penstock_tests.noise_like(x.detach())
    return x + noise


@pytest.mark.parametrize(
    "way, operator", one_each(WAYS, [pytest.param(noisy, id="noisy"), low_level])
)
def test_an_operator_of_the_users_own_that_draws_equals_the_unsplit_model(operator, way) -> None:
    def layers() -> list[Any]:
        both = nn.Sequential(nn.Dropout(0.2), Does(operator), nn.Linear(6, 6))
        return [nn.Linear(6, 6), Does(operator), both, nn.Linear(6, 3)]

    model = Model("operator", layers, vectors, F.mse_loss)
    assert_trains_like_unsplit(model, 5, partition=(2, 2), num_microbatches=2, **way)


@pytest.mark.parametrize("way", WAYS)
def test_an_operator_that_draws_in_its_backward_is_refused(way: dict[str, Any]) -> None:
    model = Model("backward", lambda: [Does(noisy_backward), nn.Linear(6, 3)], vectors, F.mse_loss)
    [(x, y)] = model.batches(5, count=1)
    x.requires_grad_()
    with (
        pipeline(model, model.build(), num_stages=2, num_microbatches=2, **way) as pipe,
        pytest.raises(penstock.errors.RandomnessError, match=r"draws in its backward|own draws"),
    ):
        pipe.train_step(x, y)


@pytest.mark.parametrize("way", WAYS)
def test_draws_of_dropout_modules_and_of_functions_go_on_from_one_generator(way: Any) -> None:
    """A dropout module that two stages share, in-place ones, and draws in and beside modules."""
    shared = nn.Dropout(0.4)

    class Mixed(nn.Module):
        def __init__(self, *, outside: bool) -> None:
            super().__init__()
            self.first, self.second, self.outside = shared, nn.Dropout(0.2, True), outside
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.second(self.linear(self.first(x)))
            return self.first(F.dropout(y, 0.3) if self.outside else y)

    def layers() -> list[Any]:
        middle = [Mixed(outside=False), Mixed(outside=True), Mixed(outside=False)]
        return [nn.Linear(6, 6), *middle, nn.Linear(6, 3)]

    model = Model("mixed", layers, vectors, F.mse_loss)
    options: dict[str, Any] = {"partition": (2, 1, 2), "num_microbatches": 4, **way}
    assert_trains_like_unsplit(model, 8, steps=4, **options)
    assert "forward" not in vars(shared)


def test_a_draw_beside_a_dropout_is_seen_while_another_stage_is_in_that_dropout() -> None:
    shared, x = nn.Dropout(0.4).eval(), torch.ones(4)
    is_inside, has_drawn = threading.Event(), threading.Event()

    def wait_inside(*_: Any) -> None:
        is_inside.set()
        assert has_drawn.wait(60)

    def draw() -> None:
        other.start()
        assert is_inside.wait(60)
        F.dropout(x, 0.4)
        has_drawn.set()
        other.join()

    shared.register_forward_hook(wait_inside)
    other = threading.Thread(target=shared, args=(x,))
    watch = WatchDraws(torch.device("cpu"), [shared])
    watch.run(draw)
    assert watch.outside


def test_plain_dropout_modules_run_without_a_dispatch_mode() -> None:
    modes = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            modes.append(len(dispatch_modes()))
            return x

    layers = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), Looks()), nn.Linear(6, 3)]
    model = Model("plain", lambda: layers, vectors, F.mse_loss)
    with pipeline(model, model.build(), num_stages=2, num_microbatches=4) as pipe:
        for batch in model.batches(8, count=2):
            pipe.train_step(*batch)
    assert modes[-4:] == [0, 0, 0, 0]
