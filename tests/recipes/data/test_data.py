"""Digits, their order and their shifts: all decided by seeds, none by what ran before."""

import sys

import pytest
import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock_recipes.data import batch_indices, epoch_order, num_batches
from penstock_recipes.data.digits import Split, load_digits
from penstock_recipes.data.image_sets import epoch_shifts, shift_images


@pytest.fixture(scope="module")
def digits() -> Split:
    return load_digits()


def test_every_digit_is_in_one_part_which_has_its_share_of_every_class(digits: Split) -> None:
    inputs, targets = digits.train.inputs, digits.train.targets
    assert len(digits.train) + len(digits.test) == 1797
    rows = {tuple(image.flatten().tolist()) for image in inputs}
    assert rows.isdisjoint(tuple(image.flatten().tolist()) for image in digits.test.inputs)
    assert inputs.shape[1:] == (1, 8, 8) and inputs.dtype == torch.float32
    assert inputs.min() == 0 and inputs.max() == 1
    assert targets.dtype == torch.int64 and targets.unique().tolist() == list(range(10))
    for label in range(10):
        in_test = int((digits.test.targets == label).sum())
        assert in_test == round(0.2 * (in_test + int((targets == label).sum())))


def test_the_seed_decides_the_split(digits: Split) -> None:
    assert torch.equal(load_digits(seed=0).test.inputs, digits.test.inputs)
    assert not torch.equal(load_digits(seed=1).test.inputs, digits.test.inputs)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1])
def test_a_share_beyond_0_and_1_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=f"test_share={share}: give a share between 0 and 1"):
        load_digits(share)


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock-recipes'"):
        load_digits()


def test_an_epoch_sees_every_sample_once_in_its_own_order_and_with_its_own_shifts() -> None:
    before = torch.random.get_rng_state()
    order = epoch_order(10, seed=3, epoch=0)
    assert sorted(order.tolist()) == list(range(10))
    assert torch.equal(order, epoch_order(10, seed=3, epoch=0))
    assert not torch.equal(order, epoch_order(10, seed=3, epoch=1))
    assert not torch.equal(order, epoch_order(10, seed=4, epoch=0))
    shifts = epoch_shifts(100, seed=0, epoch=2, max_shift=1)
    assert shifts.shape == (100, 2) and set(shifts.unique().tolist()) == {-1, 0, 1}
    assert torch.equal(shifts, epoch_shifts(100, seed=0, epoch=2, max_shift=1))
    assert not torch.equal(shifts, epoch_shifts(100, seed=0, epoch=3, max_shift=1))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("num_samples, batch_size", [(10, 5), (10, 4), (3, 8), (1, 1)])
def test_the_batches_of_an_epoch_are_its_order(num_samples: int, batch_size: int) -> None:
    order = epoch_order(num_samples, seed=0, epoch=0)
    batches = num_batches(num_samples, batch_size)
    parts = [batch_indices(order, batch, batch_size) for batch in range(batches)]
    assert torch.equal(torch.cat(parts), order)
    assert all(0 < len(part) <= batch_size for part in parts)


@pytest.mark.parametrize(
    "shift, expected",
    [
        *(([0, 0], [[1, 2], [3, 4]]), ([1, 0], [[0, 0], [1, 2]]), ([-1, 0], [[3, 4], [0, 0]])),
        *(([0, 1], [[0, 1], [0, 3]]), ([1, -1], [[0, 0], [2, 0]]), ([2, 2], [[0, 0], [0, 0]])),
    ],
)
def test_an_image_moves_down_and_right_and_zeros_enter(shift, expected) -> None:
    def image(rows: list[list[int]]) -> Tensor:
        return torch.tensor([[rows]], dtype=torch.float32)

    moved = shift_images(image([[1, 2], [3, 4]]), torch.tensor([shift]))
    assert torch.equal(moved, image(expected))
