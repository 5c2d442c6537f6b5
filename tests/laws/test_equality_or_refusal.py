"""What few models do: each is either right to the bit or refused; none is silently wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from tests.model_parts import Does, InPlaceAffine
from tests.models import BY_NAME, Built, Model, token_loss, tokens, vectors
from tests.reference import Forward, Unsplit
from tests.side_by_side import assert_trains_like_unsplit, differences, pipeline, same_bits
from tests.ways import WAYS, one_each


def model(
    layers: Callable[[], list[Any]], forward: Forward | None = None, **options: Any
) -> Model:
    return Model("made here", layers, vectors, F.mse_loss, forward, **options)


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_is_stopped_leaves_none_before_it(way: dict[str, Any]) -> None:
    stopped = model(lambda: [nn.Linear(6, 6), nn.Tanh(), Does(Tensor.detach), nn.Linear(6, 3)])
    for partition in ((1, 1, 1, 1), (2, 2), (3, 1)):
        assert_trains_like_unsplit(stopped, 7, partition=partition, num_microbatches=3, **way)


@pytest.mark.parametrize("way", WAYS)
def test_a_value_changed_in_place_while_a_skip_still_reads_it(way: dict[str, Any]) -> None:
    def layers() -> list[Any]:
        return [
            penstock.Layer(nn.Linear(6, 6), outputs="a"),
            penstock.Layer(InPlaceAffine(), outputs="b"),
            penstock.Layer(nn.Linear(6, 6), outputs="c"),
            penstock.Layer(Does(lambda a, b: a + b), inputs=("c", "a")),
            nn.Linear(6, 3),
        ]

    def forward(call: Callable[..., Any], x: Any) -> Any:
        a = call(0, x)
        return call(4, call(3, call(2, call(1, a)), a))

    for partition in ((5,), (1, 1, 1, 2), (1, 4), (2, 3), (3, 2), (1, 1, 3)):
        try:
            assert_trains_like_unsplit(
                model(layers, forward), 7, partition=partition, num_microbatches=3, **way
            )
        except (penstock.PenstockError, RuntimeError) as error:
            assert any(word in str(error) for word in ("in place", "inplace", "two names"))


class Slope(nn.Module):  # add the gradient of an inner loss
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).tanh()
        return y + torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)[0]


def _double_gradients(module: nn.Module, given: Any, output: Tensor) -> None:
    output.register_hook(lambda gradient: gradient * 2)


@pytest.mark.parametrize("partition, way", one_each(((3,), (2, 1), (1, 2), (1, 1, 1)), WAYS))
def test_a_hook_on_a_value_whose_gradient_the_next_layer_computes_is_right_or_refused(
    way: dict[str, Any], partition: tuple[int, ...]
) -> None:
    def layers() -> list[Any]:
        first = nn.Linear(6, 6)
        first.register_forward_hook(_double_gradients)
        return [first, Slope(), nn.Linear(6, 3)]

    hooked = model(layers)
    is_recomputed = way["recompute"] is not penstock.Recompute.NEVER
    try:
        assert_trains_like_unsplit(hooked, 7, partition=partition, num_microbatches=3, **way)
    except penstock.errors.RecomputeError:
        assert is_recomputed
    except penstock.errors.BoundaryError as error:
        assert "a hook is" in str(error) and partition[0] == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_hook_on_a_value_that_leaves_its_stage_is_right(way: dict[str, Any]) -> None:
    def layers() -> list[Any]:
        first = nn.Linear(6, 6)
        first.register_forward_hook(_double_gradients)
        return [first, nn.Linear(6, 6), nn.Linear(6, 3)]

    assert_trains_like_unsplit(model(layers), 7, partition=(1, 1, 1), num_microbatches=3, **way)


class _Use(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, extra: Tensor, n: int) -> Tensor:
        return self.linear(x).sin() * n + self.linear(extra) + x


@pytest.mark.parametrize(
    "partition, way",
    one_each(((1, 1, 1, 1, 1), (2, 1, 1, 1), (2, 1, 2), (3, 2), (5,)), WAYS),
)
def test_one_tensor_under_two_names_and_a_number_by_name(partition: Any, way: Any) -> None:
    def layers() -> list[Any]:
        return [
            nn.Linear(6, 6),
            penstock.Layer(Does(lambda x: (x, x, 3)), outputs=("a", "b", "n")),
            penstock.Layer(_Use(), inputs=("a", "b", "n"), outputs="y"),
            penstock.Layer(_Use(), inputs=("b", "y", "n"), outputs="z"),
            penstock.Layer(_Use(), inputs=("z", "a", "n")),
        ]

    def forward(call: Callable[..., Any], x: Any) -> Any:
        a, b, n = call(1, call(0, x))
        return call(4, call(3, b, call(2, a, b, n), n), a, n)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output[:, :3], target)

    aliased = Model("aliased", layers, vectors, loss, forward)
    try:
        assert_trains_like_unsplit(aliased, 7, partition=partition, num_microbatches=3, **way)
    except penstock.PenstockError as error:
        assert "two names" in str(error)
        assert len(partition) > 3  # the two names go to different stages


class Parcel:  # a class of the user's own, which hides its tensor
    def __init__(self, x: Tensor) -> None:
        self.x = x


class _Pack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Parcel:
        return Parcel(self.linear(x))


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_hidden_in_a_users_own_object(way: dict[str, Any]) -> None:
    hidden = model(
        lambda: [nn.Linear(6, 6), _Pack(), Does(lambda parcel: parcel.x.tanh()), nn.Linear(6, 3)]
    )
    try:
        assert_trains_like_unsplit(hidden, 7, partition=(2, 2), num_microbatches=3, **way)
    except (penstock.PenstockError, RuntimeError) as error:
        assert not isinstance(error, AssertionError)


@pytest.mark.parametrize("way", WAYS)
def test_sparse_gradients(way: dict[str, Any]) -> None:
    def layers() -> list[Any]:
        return [nn.Embedding(11, 4, sparse=True), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 11)]

    sparse = Model("sparse", layers, tokens, token_loss)
    assert_trains_like_unsplit(sparse, 7, partition=(1, 3), num_microbatches=3, **way)


@pytest.mark.parametrize("way", WAYS)
def test_hooks_on_parameters_fire_as_unsplit(way: dict[str, Any]) -> None:
    calls: list[str] = []

    def layers() -> list[Any]:
        stack = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)]
        weight = stack[0].get_parameter("weight")
        weight.register_hook(lambda gradient: gradient * 0.3)
        weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("called"))
        stack[2].register_full_backward_hook(lambda _, into, out: (into[0] * 2,))  # type: ignore[index]
        return stack

    options: dict[str, Any] = {"steps": 1, "partition": (1, 1, 1), "num_microbatches": 3}
    assert_trains_like_unsplit(model(layers), 7, **options, **way)
    assert len(calls) == 2 * 3


@pytest.mark.parametrize(
    "name, way",
    one_each(("convolutions", "transformer", "changing_buffers", "odd_parameters"), WAYS),
)
def test_many_optimizer_steps_give_the_unsplit_weights(name: str, way: dict[str, Any]) -> None:
    chosen = BY_NAME[name]
    built, twin = chosen.build(), chosen.build()
    unsplit = Unsplit(twin.modules, twin.forward, 3)
    with pipeline(chosen, built, num_stages=3, num_microbatches=3, **way) as pipe:
        ours = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        theirs = torch.optim.AdamW(nn.ModuleList(twin.modules).parameters(), lr=0.01)
        for n, (x, y) in enumerate(chosen.batches(7, count=5)):
            assert same_bits(pipe.train_step(x, y), unsplit.train_step(x, y, chosen.loss))
            ours.step()
            theirs.step()
            ours.zero_grad(set_to_none=n % 2 == 0)
            theirs.zero_grad(set_to_none=n % 2 == 0)
            assert not differences(built.modules, twin.modules)


@pytest.mark.parametrize("way", WAYS)
def test_inputs_that_require_grad_get_it_from_a_step(way: dict[str, Any]) -> None:
    chosen = BY_NAME["unet"]
    built, twin = chosen.build(), chosen.build()
    [(x, y)] = chosen.batches(7, count=1)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    unsplit = Unsplit(twin.modules, twin.forward, 3)
    with pipeline(chosen, built, num_stages=3, num_microbatches=3, **way) as pipe:
        pipe.train_step(ours, y)
    outstanding = unsplit.module_forward(theirs)
    for i, (output, target) in enumerate(zip(outstanding.outputs, y.tensor_split(3), strict=True)):
        (chosen.loss(output, target) * (len(target) / 7)).backward()
        assert outstanding.pieces[i].grad is not None
    assert ours.grad is not None
    assert torch.equal(ours.grad, torch.cat([piece.grad for piece in outstanding.pieces]))


def waiting(way: dict[str, Any]) -> tuple[penstock.Pipeline, Built, Built, Tensor, Unsplit, Any]:
    """Start a forward in the module form, and unsplit; their backward is still to come."""
    chosen = BY_NAME["convolutions"]
    built, twin = chosen.build(), chosen.build()
    unsplit = Unsplit(twin.modules, twin.forward, 3)
    [(x, y)] = chosen.batches(7, count=1)
    pipe = pipeline(chosen, built, num_stages=3, num_microbatches=3, **way)
    loss, outstanding = chosen.loss(pipe(x), y), unsplit.module_forward(x.clone())
    chosen.loss(outstanding.output, y).backward()
    outstanding.backward()
    return pipe, built, twin, loss, unsplit, x


def backward_is_right_or_refused(loss: Tensor, built: Built, twin: Built) -> None:
    """Run the backward; whatever was done meanwhile, no gradient may be silently wrong."""
    try:
        loss.backward()
    except (penstock.PenstockError, RuntimeError) as error:
        assert str(error)
        return
    for a, b in zip(built.modules, twin.modules, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            assert same_bits(p.grad, q.grad)


def move_weights(pipe: penstock.Pipeline, _: Tensor) -> None:
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.add_(0.5)


def change_inputs(_: penstock.Pipeline, x: Tensor) -> None:
    x.zero_()


def evaluate(pipe: penstock.Pipeline, _: Tensor) -> None:
    pipe.eval()


@pytest.mark.parametrize("way, change", one_each(WAYS, (move_weights, change_inputs, evaluate)))
def test_a_change_between_forward_and_backward(change: Any, way: Any) -> None:
    pipe, built, twin, loss, _, x = waiting(way)
    change(pipe, x)
    backward_is_right_or_refused(loss, built, twin)
    pipe.close()


@pytest.mark.parametrize("way", WAYS)
def test_steps_between_forward_and_backward(way: dict[str, Any]) -> None:
    pipe, built, twin, loss, unsplit, x = waiting(way)
    y = torch.zeros(7, dtype=torch.long)
    pipe.train_step(x, y)
    unsplit.train_step(x, y, F.cross_entropy)
    for module in (*built.modules, *twin.modules):
        module.zero_grad()
    chosen = BY_NAME["convolutions"]
    twin_again = chosen.build()
    again = Unsplit(twin_again.modules, twin_again.forward, 3)
    again.module_step(x, chosen.batches(7, count=1)[0][1], chosen.loss)
    backward_is_right_or_refused(loss, built, twin_again)
    pipe.close()


def test_a_graph_of_the_gradients_is_refused() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    pipe = penstock.Pipeline([nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)], 2, num_microbatches=2)
    with pipe, pytest.raises(penstock.PenstockError, match="create_graph"):
        torch.autograd.grad(pipe(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("way", WAYS)
def test_a_second_backward_through_one_forward(way: dict[str, Any]) -> None:
    pipe, built, twin, loss, _, _ = waiting(way)
    loss.backward(retain_graph=True)
    with pytest.raises((penstock.PenstockError, RuntimeError), match="retain_graph"):
        loss.backward()
    for a, b in zip(built.modules, twin.modules, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            assert same_bits(p.grad, q.grad)
    pipe.close()


@pytest.mark.parametrize(
    "way, dtype", one_each(WAYS, (torch.float64, torch.bfloat16, torch.complex64))
)
def test_other_types_of_number(dtype: torch.dtype, way: dict[str, Any]) -> None:
    def batch(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = vectors(n, g)
        return x.to(dtype), y.to(dtype)

    typed = Model(
        "typed",
        lambda: [nn.Linear(6, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, 3, dtype=dtype)],
        batch,
        lambda output, target: (output - target).abs().mean(),
    )
    assert_trains_like_unsplit(typed, 7, num_stages=3, num_microbatches=3, **way)
