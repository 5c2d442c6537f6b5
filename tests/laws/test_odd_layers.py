"""Layers that torch treats in ways of its own: sparse tensors, scripted and lazy modules."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError, StatisticsWarning
from tests.laws.test_equality_or_refusal import model
from tests.models import drawn
from tests.side_by_side import assert_trains_like_unsplit, same_bits
from tests.ways import WAYS, one_each

deprecated = pytest.mark.filterwarnings("ignore:.*torch.jit")


def words() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randint(11, (7, 5), generator=generator),
        torch.randint(3, (7,), generator=generator),
    )


def embedded(*, sparse: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Embedding(11, 6, sparse=sparse), nn.Linear(6, 6), nn.Flatten(), nn.Linear(30, 3)]


def pipeline(layers: list[nn.Module], loss: Any, **way: Any) -> penstock.Pipeline:
    return penstock.Pipeline(layers, 2, num_microbatches=3, loss=loss, threads_per_stage=1, **way)


@pytest.mark.parametrize("way", WAYS)
def test_sparse_gradients_are_the_dense_ones_and_are_clipped_alike(way: dict[str, Any]) -> None:
    sparse, dense = embedded(sparse=True), embedded(sparse=False)
    norms = []
    for layers in (sparse, dense):
        with pipeline(layers, F.cross_entropy, **way) as pipe:
            for _ in range(2):
                pipe.train_step(*words())
            norms.append(penstock.clip_grad_norm_(pipe, 0.01))
    assert norms[0] > 0.01
    torch.testing.assert_close(norms[0], norms[1])
    both = (nn.Sequential(*layers).parameters() for layers in (sparse, dense))
    for a, b in zip(*both, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad.to_dense(), b.grad)
    assert next(sparse[0].parameters()).grad.is_sparse  # type: ignore[union-attr]


def test_training_with_sparse_gradients_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    def optimizers(layers: list[nn.Module]) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(list(layers[0].parameters()))

    def steps(pipe: penstock.Pipeline, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            pipe.train_step(*words())
            optimizer.step()
            pipe.zero_grad()

    layers, again = embedded(sparse=True), embedded(sparse=True)
    with pipeline(layers, F.cross_entropy) as pipe, pipeline(again, F.cross_entropy) as other:
        optimizer, of_other = optimizers(layers), optimizers(again)
        steps(pipe, optimizer)
        penstock.save_checkpoint(tmp_path / "saved", pipe, optimizer, step=2)
        penstock.load_checkpoint(tmp_path / "saved", other, of_other)
        steps(pipe, optimizer)
        steps(other, of_other)
    both = (nn.Sequential(*of).parameters() for of in (layers, again))
    for a, b in zip(*both, strict=True):
        assert same_bits(a, b)


class Counting(nn.Module):  # change a buffer in the forward
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1.0)
        if bool(x.sum() > 0):
            x = x * 2
        y: Tensor = self.linear(x) + self.calls
        return y


def with_scripted(*, traced: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    first = nn.Linear(6, 6)
    made = torch.jit.trace(first, torch.randn(2, 6)) if traced else torch.jit.script(first)
    return [made, nn.Tanh(), torch.jit.script(Counting()), nn.Linear(6, 3)]


@deprecated
@pytest.mark.parametrize("way, traced", one_each(WAYS, (False, True)))
def test_scripted_layers_train_as_in_plain_torch(way: dict[str, Any], traced: bool) -> None:
    made = model(lambda: with_scripted(traced=traced))
    assert_trains_like_unsplit(made, 6, steps=2, num_stages=2, num_microbatches=3, **way)


@deprecated
def test_the_statistics_of_a_scripted_norm_move_with_every_micro_batch_and_that_is_said() -> None:
    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        norm = torch.jit.script(nn.Sequential(nn.BatchNorm1d(6), nn.Tanh()))
        return [nn.Linear(6, 6), norm, nn.Linear(6, 3)]

    ours, plain = layers(), nn.Sequential(*layers())
    x, y = drawn(6)
    with (
        pytest.warns(StatisticsWarning, match="BatchNorm1d.*scripted.*every micro-batch"),
        pipeline(ours, F.mse_loss) as pipe,
    ):
        pipe.train_step(x, y)
    for part in x.split(2):
        plain(part)
    for a, b in zip(nn.Sequential(*ours).buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b)  # torch.jit rounds in another way from its third call on


@deprecated
def test_the_check_refuses_a_model_whose_copies_share_its_parameters() -> None:
    with pytest.raises(ConfigError, match=r"copy.deepcopy.*scripted.*before it is scripted"):
        penstock.check(with_scripted(traced=False), *drawn(6), loss=F.mse_loss, num_stages=2)


@pytest.mark.parametrize(
    "lazy",
    (lambda: nn.LazyLinear(6), nn.LazyBatchNorm1d, lambda: nn.LazyBatchNorm1d(affine=False)),
)
def test_lazy_layers_are_refused_until_they_have_run(lazy: Any) -> None:
    layers = [nn.Linear(6, 6), lazy(), nn.Linear(6, 3)]
    x, y = drawn(6)
    with pytest.raises(ConfigError, match=r"layer '1'.*lazy module.*run the model once"):
        pipeline(layers, F.mse_loss)
    nn.Sequential(*layers)(x)
    with pipeline(layers, F.mse_loss) as pipe:
        assert pipe.train_step(x, y).isfinite()


class Spread(nn.Module):  # spread the features over a graph, whose sparse matrix goes on with them
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, graph = batch
        return torch.sparse.mm(graph, self.linear(x).T).T, graph


def last_of(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output[0], target)


@pytest.mark.parametrize("way", WAYS)
def test_a_sparse_tensor_crosses_stages(way: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours, plain = (nn.Sequential(Spread(), Spread()) for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    x, _ = drawn(6)
    graph = torch.eye(6).roll(1, 0).to_sparse()
    with pipeline(list(ours), last_of, **way) as pipe:
        for _ in range(2):
            pipe.train_step((x, penstock.Whole(graph)), x)
    for _ in range(2):
        for part in x.split(2):
            loss = last_of(plain((part, graph)), part)
            loss.backward(torch.full_like(loss, 1 / 3))
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert same_bits(a.grad, b.grad)
