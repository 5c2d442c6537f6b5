"""Classify pictures."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.data.pictures import Pictures, digit_pictures
from penstock.errors import RecipeError
from penstock.train.data_sections import Digits
from penstock.train.layout import check_batches
from penstock.train.model_sections import AmoebaNet, Residual
from penstock.train.recipe import Recipe
from penstock.zoo import amoebanet_b, amoebanet_d, set_drop_path_progress
from penstock.zoo.residual import residual_network

from .task import Batch, Measure, Part, Share, Task


class PictureTask(Task):
    """Tells the class of each picture: the model gives (B, classes), and while it is trained may
    give a second such output of an auxiliary head beside it.
    """

    def __init__(self, recipe: Recipe, pictures: Pictures) -> None:
        self._recipe, self._pictures = recipe, pictures
        self.num_test = pictures.num_test
        self._top = min(5, len(pictures.classes))
        self.measures = (Measure("test_accuracy", "test accuracy"),)
        if len(pictures.classes) > 10:
            self.measures += (Measure("test_top5", "top 5"),)

    @classmethod
    def of(cls, recipe: Recipe) -> "PictureTask":
        """Read the pictures that a recipe names."""
        return cls(recipe, open_pictures(recipe))

    def check(self, num_replicas: int) -> None:
        check_batches(self._recipe, self._pictures.num_train)

    def make_model(self) -> nn.Module:
        return make_network(self._recipe, self._pictures)

    def example(self, num_samples: int) -> Tensor:
        return self._pictures.example(num_samples)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        smoothing = self._recipe.train.label_smoothing
        if isinstance(outputs, Tensor):
            return F.cross_entropy(outputs, targets, label_smoothing=smoothing)
        main, auxiliary = (F.cross_entropy(o, targets, label_smoothing=smoothing) for o in outputs)
        model = self._recipe.model
        assert isinstance(model, AmoebaNet)
        return main + model.auxiliary_weight * auxiliary

    def num_steps(self, epoch: int) -> int:
        return -(-self._pictures.num_train // self._recipe.batch_size)

    def batches(self, epoch: int, first: int, share: Share) -> Iterator[Batch]:
        size, seed = self._recipe.batch_size, self._recipe.train.seed
        for inputs, targets, count in self._pictures.batches(seed, epoch, first, size, share):
            yield Batch([Part(inputs, targets)], count, is_full=count == size)

    def tests(self, samples: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        return self._pictures.tests(samples, self._recipe.batch_size)

    def tally(self, outputs: Tensor, targets: Tensor) -> Tensor:
        best = outputs.topk(self._top, dim=1).indices == targets[:, None]
        return torch.stack([best[:, 0], best.any(dim=1)], dim=1).to(torch.float64)

    def scores(self, totals: Sequence[float]) -> Mapping[str, float]:
        names = [measure.name for measure in self.measures]
        return dict(zip(names, [total / self.num_test for total in totals], strict=False))

    def begin_step(self, model: nn.Module, progress: float) -> None:
        if isinstance(self._recipe.model, AmoebaNet):
            set_drop_path_progress(model, progress)


def open_pictures(recipe: Recipe) -> Pictures:
    """Read the pictures that a recipe names.

    Raises:
        ConfigError: they cannot be read.
    """
    d = recipe.data
    assert isinstance(d, Digits)
    return digit_pictures(
        d.labels,
        size=d.size,
        train_share=d.train_share,
        test_share=d.test_share,
        max_shift=d.max_shift,
        seed=d.seed,
    )


def make_network(recipe: Recipe, pictures: Pictures) -> nn.Module:
    """Make the network that a recipe names, for these pictures."""
    match recipe.model:
        case Residual() as r:
            return residual_network(
                r.num_blocks,
                r.width,
                in_channels=pictures.channels,
                num_classes=len(pictures.classes),
                dropout=r.dropout,
            )
        case AmoebaNet() as a:
            build = {"b": amoebanet_b, "d": amoebanet_d}[a.genotype]
            return build(
                a.num_layers,
                a.num_filters,
                num_classes=len(pictures.classes),
                in_channels=pictures.channels,
                image_size=pictures.size,
                dropout=a.dropout,
                drop_path=a.drop_path,
                auxiliary=a.auxiliary_weight > 0,
                small=a.stem == "small",
                norm_momentum=1 - a.norm_decay,
            )
        case other:
            raise RecipeError(
                f'model.name = "{other.name}" is not made for pictures, data.name = '
                f'"{recipe.data.name}"; choose residual or amoebanet'
            )
