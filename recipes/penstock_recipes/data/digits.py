"""The handwritten digits that ship with scikit-learn: 1,797 grey images of 8 x 8 pixels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock_recipes.data import keyed_generator


@dataclass(frozen=True, slots=True)
class Samples:
    """Inputs and targets: `inputs[n]` belongs to `targets[n]`."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, slots=True)
class Split:
    """Training and test samples."""

    train: Samples
    test: Samples


def load_digits(test_share: float = 0.2, seed: int = 0) -> Split:
    """Read the digits and hold out `test_share` of each class; equal seeds give equal splits.

    Inputs: float32, (N, 1, 8, 8), from 0 to 1.  Targets: int64, (N,), the digit.

    Raises:
        ConfigError: scikit-learn is not installed, or `test_share` is not between 0 and 1.
    """
    if not 0 < test_share < 1:
        raise ConfigError(f"test_share={test_share}: give a share between 0 and 1, such as 0.2")
    try:
        from sklearn import datasets  # an optional dependency, and slow to import
    except ImportError as error:
        raise ConfigError(
            "the digits data set ships with scikit-learn, which is not installed; "
            "install it with: pip install 'penstock-recipes'"
        ) from error
    digits = datasets.load_digits()
    inputs = torch.from_numpy(digits.images).to(torch.float32).div(16.0).unsqueeze(1)
    targets = torch.from_numpy(digits.target).to(torch.int64)
    is_test = of_each_class(targets, test_share, seed, "split")
    return Split(
        train=Samples(inputs[~is_test], targets[~is_test]),
        test=Samples(inputs[is_test], targets[is_test]),
    )


def of_each_class(
    targets: Tensor, share: float, seed: int, purpose: str, least: int = 0
) -> Tensor:
    """Choose `share` of each class, `least` samples or more: bool, (N,)."""
    chosen = torch.zeros(len(targets), dtype=torch.bool)
    for label in targets.unique().tolist():
        members = (targets == label).nonzero().flatten()
        generator = keyed_generator(seed, purpose, label)
        order = torch.randperm(len(members), generator=generator)
        chosen[members[order[: max(least, round(share * len(members)))]]] = True
    return chosen
