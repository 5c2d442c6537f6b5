"""Turn an image into a network's input: augmented for training, plain for evaluation."""

from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock_recipes.data import keyed_generator, optional_library, require_library

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_DEVIATION = (0.229, 0.224, 0.225)
POLICIES = ("none", "randaugment", "autoaugment")
"""The values of `TrainingView.policy`."""
RATIOS = (3 / 4, 4 / 3)
"""Width over height of a random crop (Szegedy et al. 2015, arXiv:1409.4842, section 6)."""
INCEPTION = {"brightness": 32 / 255, "contrast": 0.5, "saturation": 0.5, "hue": 0.2}
"""Ranges of the colour changes in TF-Slim's Inception pre-processing."""
MOST_MAGNITUDE = 30
"""RandAugment's magnitudes are thirtieths of each operation's range, both ends excluded."""
Box = tuple[float, float, float, float]
"""Left, upper, right and lower edge, in pixels."""
Triple = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingView:
    """A random crop, flipped, recoloured, partly covered, and normalised: float32, (3, S, S).

    In this order: crop and resize, flip, policy, colours, normalisation, cutout.  Pillow resizes
    (it averages where it shrinks); kornia does the rest.

    Raises:
        ConfigError: a value is out of bounds, or a library is missing.
    """

    size: int
    """Pixels of a side."""
    area: tuple[float, float] = (0.1, 1.0)
    """Least and largest share of the image in the crop; (1, 1): all, squeezed into a square."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    colour: float = 0.0
    """Strength of colour changes, as a multiple of Inception's ranges; 0: none."""
    policy: str = "none"
    """randaugment: random operations of one magnitude; autoaugment: the ImageNet policy."""
    num_operations: int = 2
    """Number of RandAugment's operations."""
    magnitude: int = 9
    """Magnitude of RandAugment's operations, from 1 to 29."""
    cutout: float = 0.0
    """Side of the square that is set to the mean, as a share of the view's side; 0: none."""
    mean: Triple = IMAGENET_MEAN
    deviation: Triple = IMAGENET_DEVIATION

    def __post_init__(self) -> None:
        _check_size(self.size)
        low, high = self.area
        if not 0 < low <= high <= 1:
            raise ConfigError(f"area={self.area}: give two shares with 0 < least <= largest <= 1")
        _check_between(0, 1, flip=self.flip, cutout=self.cutout)
        _check_between(0, 0.5 / INCEPTION["hue"], colour=self.colour)
        _check_between(1, MOST_MAGNITUDE - 1, magnitude=self.magnitude)
        _check_between(1, inf, num_operations=self.num_operations)
        if self.policy not in POLICIES:
            listed = ", ".join(map(repr, POLICIES))
            raise ConfigError(f"policy={self.policy!r} is not known; choose one of {listed}")
        _check_deviation(self.deviation)
        pillow()
        require_library("kornia", "images need", "images")

    def __call__(self, image: Any, *key: object) -> Tensor:
        """Augment an image; `key` is the seed, and the global generator does not change."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(keyed_generator(*key).initial_seed())
            x_CHW = _pixels(image, self._box(image), self.size)
            for operation in _operations(self):
                x_CHW = operation(x_CHW[None])[0]
            return self._cut_out(_normalised(x_CHW, self.mean, self.deviation))

    def _box(self, image: Any) -> Box:
        width, height = image.size
        if self.area == (1.0, 1.0):
            return (0, 0, width, height)
        drawn = _crop(self).forward_parameters(torch.Size((1, 3, height, width)))
        (left, upper), _, (right, lower), _ = drawn["src"][0].tolist()
        return (left, upper, right + 1, lower + 1)

    def _cut_out(self, x_CHW: Tensor) -> Tensor:
        """Set a square to 0 whose centre is anywhere; a part of it may lie outside."""
        side = round(self.cutout * self.size)
        upper, left = (torch.randint(self.size, (2,)) - side // 2).tolist()
        x_CHW[:, max(upper, 0) : max(upper + side, 0), max(left, 0) : max(left + side, 0)] = 0
        return x_CHW


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationView:
    """The middle of an image, or all of it, normalised: float32, (3, S, S); nothing is random.

    Raises:
        ConfigError: a value is out of bounds, or a library is missing.
    """

    size: int
    """Pixels of a side."""
    share: float = 0.875
    """Side of the centre crop, as a share of the image's shorter side."""
    squeezed: bool = False
    """Crop that share of both sides instead and resize it to a square; with a share of 1 that is
    the whole image, as in training with an area of (1, 1)."""
    mean: Triple = IMAGENET_MEAN
    deviation: Triple = IMAGENET_DEVIATION

    def __post_init__(self) -> None:
        _check_size(self.size)
        if not 0 < self.share <= 1:
            raise ConfigError(f"share={self.share}: give a share above 0, up to 1")
        _check_deviation(self.deviation)
        pillow()

    def __call__(self, image: Any, *_key: object) -> Tensor:
        """Crop and normalise an image."""
        width, height = image.size
        sides = (width, height) if self.squeezed else (min(width, height),) * 2
        seen_width, seen_height = (self.share * side for side in sides)
        left, upper = (width - seen_width) / 2, (height - seen_height) / 2
        x_CHW = _pixels(image, (left, upper, left + seen_width, upper + seen_height), self.size)
        return _normalised(x_CHW, self.mean, self.deviation)


View = TrainingView | EvaluationView


def pillow() -> Any:
    """Return Pillow's Image module.

    Raises:
        ConfigError: it is not installed.
    """
    return optional_library("PIL.Image", "images need", "images")


@lru_cache
def _crop(view: TrainingView) -> Any:
    from kornia import augmentation  # takes two seconds to import

    return augmentation.RandomResizedCrop((view.size, view.size), scale=view.area, ratio=RATIOS)


@lru_cache
def _operations(view: TrainingView) -> tuple[Any, ...]:
    """Return kornia's operations on (1, 3, S, S) in 0 to 1; they use the global generator."""
    from kornia import augmentation
    from kornia.augmentation.auto import AutoAugment, RandAugment

    operations: list[Any] = [augmentation.RandomHorizontalFlip(p=view.flip)]
    if view.policy == "randaugment":
        operations.append(RandAugment(view.num_operations, view.magnitude))
    if view.policy == "autoaugment":
        operations.append(AutoAugment("imagenet"))
    if view.colour:
        ranges = {name: view.colour * most for name, most in INCEPTION.items()}
        operations.append(augmentation.ColorJitter(**ranges, p=1.0))
    return tuple(operations)


def _pixels(image: Any, box: Box, size: int) -> Tensor:
    """Resize the content of the box: float32, (3, S, S), from 0 to 1."""
    resized = image.resize((size, size), pillow().Resampling.BILINEAR, box=box)
    x_HWC = torch.from_numpy(np.array(resized))
    return x_HWC.permute(2, 0, 1).to(torch.float32).div(255)


def _normalised(x_CHW: Tensor, mean: Triple, deviation: Triple) -> Tensor:
    mean_C11, deviation_C11 = (torch.tensor(t)[:, None, None] for t in (mean, deviation))
    return (x_CHW - mean_C11) / deviation_C11


def _check_size(size: int) -> None:
    if type(size) is not int or size < 1:
        raise ConfigError(f"size={size!r}: give the pixels of a side, an integer from 1 up")


def _check_between(least: float, most: float, **values: float) -> None:
    for name, value in values.items():
        if not least <= value <= most:
            raise ConfigError(f"{name}={value!r}: give a number from {least:g} to {most:g}")


def _check_deviation(deviation: Triple) -> None:
    if not all(value > 0 for value in deviation):
        raise ConfigError(f"deviation={deviation}: give three numbers above 0")
