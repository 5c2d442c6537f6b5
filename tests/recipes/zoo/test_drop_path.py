"""Drop-path: zeros for some examples in training, the others scaled; the chance may rise."""

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock_recipes.zoo import DropPath, set_drop_path_progress

MANY = 4000


def kept_share(drop: DropPath) -> float:
    """Say how many of many examples are kept."""
    return float(drop(torch.ones(MANY, 1)).count_nonzero()) / MANY


def test_an_example_is_dropped_whole_or_kept_whole_and_scaled() -> None:
    x = torch.rand(64, 3, 4, 5) + 1
    y: Tensor = DropPath(0.75)(x)
    dropped = (y == 0).flatten(1).all(1)
    assert 0 < dropped.sum() < len(x)
    assert torch.equal(y[~dropped], x[~dropped] * 4)


def test_as_many_are_dropped_as_the_rate_says_and_the_mean_stays() -> None:
    assert kept_share(DropPath(0.3)) == pytest.approx(0.7, abs=0.03)
    assert float(DropPath(0.3)(torch.ones(MANY, 1)).mean()) == pytest.approx(1, abs=0.05)


def test_nothing_is_dropped_at_rate_0_nor_in_evaluation() -> None:
    x = torch.randn(16, 3)
    assert torch.equal(DropPath(0.0)(x), x)
    assert torch.equal(DropPath(0.9).eval()(x), x)


def test_the_chance_grows_with_progress() -> None:
    drop = DropPath(0.8)
    x = torch.randn(MANY, 1)
    set_drop_path_progress(drop, 0)
    assert torch.equal(drop(x), x)
    set_drop_path_progress(drop, 0.5)
    assert kept_share(drop) == pytest.approx(0.6, abs=0.03)
    set_drop_path_progress(drop, 1)
    assert kept_share(drop) == pytest.approx(0.2, abs=0.03)


def test_progress_reaches_every_module_and_only_those() -> None:
    model = nn.Sequential(DropPath(0.1), nn.Sequential(nn.Linear(2, 2), DropPath(0.2)))
    set_drop_path_progress(model, 0.25)
    found = [m.progress for m in model.modules() if isinstance(m, DropPath)]
    assert found == [0.25, 0.25]


def test_it_draws_from_the_first_step_on_where_nothing_is_dropped_yet() -> None:
    drop = DropPath(0.5)
    set_drop_path_progress(drop, 0)
    before = torch.get_rng_state()
    drop(torch.ones(4, 2))
    assert not torch.equal(torch.get_rng_state(), before)


def test_dropped_examples_get_no_gradient() -> None:
    x = torch.ones(64, 2, requires_grad=True)
    y = DropPath(0.5)(x)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y)


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_rate_or_a_progress_that_is_no_share_is_refused(share: float) -> None:
    for rate in (share, 1.0, 70):
        with pytest.raises(ConfigError, match=rf"drop-path rate {rate}: .* from 0 to below 1"):
            DropPath(rate)
    with pytest.raises(ConfigError, match="share of all training steps that are done"):
        set_drop_path_progress(nn.Identity(), share)
