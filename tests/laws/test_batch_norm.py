"""BatchNorm: micro-batch statistics in training; running ones move once per mini-batch.

Where the forward is not torch's own, they move with every micro-batch, as in plain torch.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import penstock
from penstock.errors import ConfigError, StatisticsWarning
from tests.models import Model, images
from tests.reference import plain_step
from tests.side_by_side import assert_trains_like_unsplit, differences
from tests.ways import WAYS, in_pairs, in_turns, one_each


def norm_first(**options: Any) -> list[nn.Module]:
    """Give a model whose BatchNorm sees the inputs themselves."""
    torch.manual_seed(0)
    first: list[Any] = [nn.BatchNorm2d(2, **options), nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(1)]
    return [*first, nn.Flatten()]


def train(
    layers: list[nn.Module], batches: list[Any], num_stages: int = 2, **options: Any
) -> None:
    with penstock.Pipeline(
        layers, num_stages=num_stages, loss=F.cross_entropy, threads_per_stage=1, **options
    ) as pipe:
        for x, y in batches:
            pipe.train_step(x, y)


def some_batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [images(n, generator) for n in sizes]


def running(module: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    buffers = dict(module.named_buffers())
    return buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]


@pytest.mark.parametrize(
    "momentum, sizes, way",
    in_pairs((0.1, 1.0, None), ((8, 4), (7, 3), (2, 4), (5, 1)), WAYS),
)
def test_running_statistics_are_those_of_the_whole_mini_batches(momentum, sizes, way) -> None:
    num_samples, num_microbatches = sizes
    ours, whole = norm_first(momentum=momentum)[0], norm_first(momentum=momentum)[0]
    batches = some_batches(num_samples, num_samples + 1, 4)
    train([ours, *norm_first()[1:]], batches, num_microbatches=num_microbatches, **way)
    for x, _ in batches:
        whole(x)
    assert int(running(ours)[2]) == int(running(whole)[2]) == 3
    torch.testing.assert_close(running(ours), running(whole), rtol=1e-6, atol=1e-6)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "momentum None": lambda: nn.BatchNorm2d(4, momentum=None),
    "momentum 0": lambda: nn.BatchNorm2d(4, momentum=0.0),
    "not tracking": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "not affine": lambda: nn.BatchNorm2d(4, affine=False),
    "frozen weights": lambda: nn.BatchNorm2d(4, eps=0.1).requires_grad_(False),
    "frozen statistics": lambda: nn.BatchNorm2d(4).eval(),
    "instance": lambda: nn.InstanceNorm2d(4, track_running_stats=True, affine=True),
    "one-dimensional": lambda: nn.Sequential(nn.Flatten(2), nn.BatchNorm1d(4)),
    "twice in a layer": lambda: _Both(nn.BatchNorm2d(4)),
}


@pytest.mark.parametrize("kind, way", one_each(KINDS, WAYS))
def test_every_kind_equals_the_unsplit_model(kind: str, way: dict[str, Any]) -> None:
    def layers() -> list[Any]:
        return [nn.Conv2d(2, 4, 3), KINDS[kind](), nn.Flatten(), nn.Linear(144, 3)]

    model = Model("one norm", layers, images, F.cross_entropy)
    for samples, stages in ((7, 4), (8, 2)):
        assert_trains_like_unsplit(model, samples, num_stages=stages, num_microbatches=3, **way)


def test_layers_that_share_a_norm_on_one_stage_pool_both_calls() -> None:
    def layers() -> list[Any]:
        norm = nn.BatchNorm2d(2)
        return [norm, nn.Conv2d(2, 2, 3, padding=1), norm, nn.Flatten(), nn.Linear(128, 3)]

    model = Model("shared norm", layers, images, F.cross_entropy)
    assert_trains_like_unsplit(model, 7, partition=(4, 1), num_microbatches=3)


def test_the_module_form_moves_the_statistics_once_at_its_forward() -> None:
    ours, whole = norm_first(), norm_first()[0]
    [(x, y)] = some_batches(7)
    with penstock.Pipeline(ours, num_stages=2, num_microbatches=3, threads_per_stage=1) as pipe:
        output = pipe(x)
        whole(x)
        torch.testing.assert_close(running(ours[0]), running(whole), rtol=1e-6, atol=1e-6)
        before = [b.clone() for b in running(ours[0])]
        F.cross_entropy(output, y).backward()
    assert all(torch.equal(a, b) for a, b in zip(running(ours[0]), before, strict=True))


def test_a_failed_step_leaves_no_stand_ins_behind() -> None:
    layers, whole = norm_first(), norm_first()[0]
    before = [b.clone() for b in running(layers[0])]
    [(x, _)] = some_batches(6)
    with pytest.raises(IndexError):
        train(layers, [(x, torch.full((6,), 99))], num_microbatches=3)
    whole(x)
    moved_by = abs(running(layers[0])[0] - before[0]).max()
    assert moved_by == 0 or torch.allclose(running(layers[0])[0], running(whole)[0])
    assert isinstance(layers[0], nn.BatchNorm2d) and layers[0].momentum == 0.1


def test_synchronised_batch_norm_is_refused_with_the_alternative() -> None:
    with pytest.raises(penstock.errors.ConfigError, match=r"SyncBatchNorm.*use BatchNorm"):
        train([nn.SyncBatchNorm(2), *norm_first()[1:]], some_batches(4), num_microbatches=2)


class _Both(nn.Module):  # apply one norm twice
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.norm(x).relu() + x)
        return y


class _Frozen(nn.Module):  # normalise by the running statistics, in training too
    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.how = nn.BatchNorm2d(4), how
        self.norm.running_mean = torch.full((4,), 0.5)
        self.norm.running_var = torch.full((4,), 4.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "reads":
            return F.batch_norm(x, self.norm.running_mean, self.norm.running_var)
        if self.how == "functional":
            mean, variance = self.norm.running_mean, self.norm.running_var
            return F.batch_norm(x, mean, variance, training=True)
        was = self.norm.training
        y: Tensor = self.norm.eval()(x)
        self.norm.train(was)
        return y


def frozen(how: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), _Frozen(how), nn.Flatten(), nn.Linear(144, 3))


@pytest.mark.parametrize("how, way", in_turns(("evaluates", "reads")))
def test_what_reads_the_statistics_in_training_sees_them(how: str, way: dict[str, Any]) -> None:
    ours, whole = frozen(how), frozen(how)
    [(x, y)] = some_batches(6)
    train(list(ours), [(x, y)], num_microbatches=3, **way)
    plain_step(whole, (x, y), F.cross_entropy)
    assert not differences([ours], [whole])


def test_statistics_that_something_else_moves_are_refused() -> None:
    with pytest.raises(penstock.errors.ConfigError, match="other than by a call"):
        train(list(frozen("functional")), some_batches(4), num_microbatches=2)


def test_a_norm_put_in_after_the_pipeline_was_made_is_refused() -> None:
    block = nn.Sequential(nn.Flatten(), nn.Linear(72, 3))
    [(x, y)] = some_batches(4)
    with penstock.Pipeline(
        [nn.Conv2d(2, 2, 3), block], 2, num_microbatches=2, loss=F.cross_entropy
    ) as pipe:
        block.append(nn.BatchNorm1d(3))
        with pytest.raises(penstock.errors.ConfigError, match="BatchNorm layers, and others"):
            pipe.train_step(x, y)


class _Renormalised(nn.BatchNorm2d):
    """Batch renormalisation: the running statistics take part in training."""

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = x.mean((0, 2, 3)), (x.var((0, 2, 3)) + self.eps).sqrt()
        running_mean, running_var, _ = running(self)
        known = (running_var + self.eps).sqrt()
        ratio = (deviation.detach() / known).clamp(0.25, 4)
        offset = ((mean.detach() - running_mean) / known).clamp(-5, 5)
        with torch.no_grad():
            running_mean += 0.1 * (mean - running_mean)
            running_var += 0.1 * (deviation**2 - running_var)
        y = (x - mean[:, None, None]) / deviation[:, None, None]
        return y * ratio[:, None, None] + offset[:, None, None]


class _OwnMomentum(nn.BatchNorm2d):
    """A forward of its own, whose kernel moves the statistics by its own momentum."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, training=True, momentum=0.3)


class _FixedMomentum(nn.BatchNorm2d):  # torch's forward, with a momentum that nobody can set
    momentum = property(lambda self: 0.2, lambda self, value: None)


class _NoBatchNorm(nn.Module):
    """Buffers that torch's kernel moves, in a module that is no BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.get_buffer("mean"), self.get_buffer("variance")
        return F.batch_norm(x, mean, variance, training=True)


def _rebound() -> nn.Module:
    norm = nn.BatchNorm2d(4)
    norm.forward = lambda x: nn.BatchNorm2d.forward(norm, x) * 2  # type: ignore[method-assign,assignment]
    return norm


OWN_FORWARDS = [
    pytest.param(lambda: _Renormalised(4), id="reads the statistics"),
    pytest.param(lambda: _OwnMomentum(4), id="own momentum"),
    pytest.param(lambda: _FixedMomentum(4), id="fixed momentum"),
    pytest.param(_rebound, id="bound to the instance"),
]


def around(norm: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Flatten(), nn.Linear(144, 3))


def assert_trains_like_plain_torch(norm: Callable[[], nn.Module], **way: Any) -> None:
    ours, plain, batches = around(norm()), around(norm()), some_batches(6, 6)
    train(list(ours), batches, num_microbatches=3, **way)
    for batch in batches:
        plain_step(plain, batch, F.cross_entropy)
    assert not differences([ours], [plain])


@pytest.mark.parametrize("norm, way", one_each(OWN_FORWARDS, WAYS))
def test_a_forward_of_its_own_runs_as_in_plain_torch_and_that_is_said(norm: Any, way: Any) -> None:
    with pytest.warns(StatisticsWarning, match=r"1 BatchNorm layers.*with every micro-batch"):
        assert_trains_like_plain_torch(norm, **way)


@pytest.mark.parametrize("way", WAYS)
def test_a_recompute_does_not_move_buffers_that_a_kernel_moves(way: dict[str, Any]) -> None:
    assert_trains_like_plain_torch(_NoBatchNorm, **way)


def test_buffers_that_a_kernel_begins_to_move_later_are_seen() -> None:
    class Switched(_NoBatchNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.training else x

    ours, plain = around(Switched()), around(Switched())
    [(x, y)] = some_batches(6)
    with penstock.Pipeline(
        list(ours), 2, num_microbatches=3, loss=F.cross_entropy, threads_per_stage=1
    ) as pipe:
        for training in (False, True):
            ours[1].train(training)
            plain[1].train(training)
            pipe.train_step(x, y)
            plain_step(plain, (x, y), F.cross_entropy)
    assert not differences([ours], [plain])


@pytest.mark.parametrize("norm", [*OWN_FORWARDS[:3], pytest.param(_NoBatchNorm, id="no norm")])
@pytest.mark.filterwarnings("ignore::penstock.errors.StatisticsWarning")
def test_the_check_compares_a_forward_of_its_own_with_plain_torch(norm: Any) -> None:
    [(x, y)] = some_batches(6)
    cut: dict[str, Any] = {"num_stages": 2, "num_microbatches": 3}
    report = penstock.check(around(norm()), x, y, loss=F.cross_entropy, **cut)
    assert report.equal, report


def test_statistics_of_a_forward_of_its_own_cannot_be_pooled_over_replicas() -> None:
    with pytest.raises(ConfigError, match=r"batch_norm_over_replicas.*_Renormalised.*leave out"):
        penstock.Pipeline(
            list(around(_Renormalised(4))), 2, batch_norm_over_replicas=True, num_microbatches=1
        )


def test_a_parametrised_norm_is_pooled() -> None:
    def norm() -> nn.Module:
        made = nn.BatchNorm2d(4)
        parametrize.register_parametrization(made, "weight", nn.Softplus())
        return made

    model = Model("parametrised", lambda: list(around(norm())), images, F.cross_entropy)
    assert_trains_like_unsplit(model, 7, num_stages=2, num_microbatches=3)
