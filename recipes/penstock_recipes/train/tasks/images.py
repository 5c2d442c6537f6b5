"""Classify images."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.errors import ConfigError
from penstock.trace.units import percent_text
from penstock_recipes.data.image_sets import ImageSet, ViewedImageSet, digit_images
from penstock_recipes.data.images import EvaluationView, TrainingView, image_folders
from penstock_recipes.data.images.batches import NO_CLASS
from penstock_recipes.errors import RecipeError
from penstock_recipes.recipe.data_sections import Digits, ImageSection
from penstock_recipes.recipe.model_sections import AmoebaNet, Residual
from penstock_recipes.recipe.recipe import Recipe
from penstock_recipes.train.layout import num_batches, smallest_microbatch
from penstock_recipes.train.run_files import SKIPPED
from penstock_recipes.zoo import amoebanet_b, amoebanet_d, set_drop_path_progress
from penstock_recipes.zoo.resnet import residual_network

from .task import Batch, Measure, Part, Share, Task


class ImageTask(Task):
    """Predicts the class of each image.

    The model returns (B, classes), and in training perhaps a second such output of an auxiliary
    head.
    """

    def __init__(self, recipe: Recipe, images: ImageSet) -> None:
        self._recipe, self._images = recipe, images
        self.num_test = images.num_test
        self._top = min(5, len(images.classes))
        self.measures = (Measure("test_accuracy", "test accuracy"),)
        if len(images.classes) > 10:
            self.measures += (Measure("test_top5", "top 5"),)

    def check(self, num_replicas: int) -> None:
        num_train, num_test = self._images.num_train, self._images.num_test
        if not num_train or not num_test:
            raise RecipeError(
                f"{num_train:,} images are to be learnt from and {num_test:,} to be judged by: "
                "both need some; choose another data.test_share"
            )
        if smallest_microbatch(self._recipe, num_train) == 1 and not self._takes_one_sample():
            raise RecipeError(
                "a micro-batch of the last step of an epoch has one sample, of which the model's "
                f"BatchNorm sees one value at {self._images.size} pixels: choose another "
                "train.batch_size, fewer pipeline.num_microbatches, or train.drop_last = true"
            )

    def _takes_one_sample(self) -> bool:
        """Tell whether the model can train on one sample: BatchNorm refuses a single value."""
        images = self._images
        with torch.device("meta"):
            model, size = make_network(self._recipe, images), images.size
            try:
                model(torch.zeros(1, images.channels, size, size))
            except ValueError:
                return False
        return True

    def make_model(self) -> nn.Module:
        return make_network(self._recipe, self._images)

    def example(self, num_samples: int) -> Tensor:
        return self._images.example(num_samples)

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        smoothing = self._recipe.train.label_smoothing
        if isinstance(outputs, Tensor):
            return F.cross_entropy(outputs, targets, label_smoothing=smoothing)
        main, auxiliary = (F.cross_entropy(o, targets, label_smoothing=smoothing) for o in outputs)
        model = self._recipe.model
        assert isinstance(model, AmoebaNet)
        return main + model.auxiliary_weight * auxiliary

    def num_steps(self, epoch: int) -> int:
        return num_batches(self._recipe, self._images.num_train)

    def batches(self, epoch: int, first: int, share: Share) -> Iterator[Batch]:
        size, seed = self._recipe.batch_size, self._recipe.train.seed
        rest = range(first, self.num_steps(epoch))
        batches = self._images.batches(seed, epoch, first, size, share)
        for _, (inputs, targets, count) in zip(rest, batches, strict=False):
            yield Batch([Part(inputs, targets)], count, is_full=count == size)

    def tests(self, samples: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        return self._images.tests(samples, self._recipe.batch_size)

    def tally(self, outputs: Tensor, targets: Tensor) -> Tensor:
        ranked_BC = outputs.argsort(dim=1, descending=True, stable=True)
        hits_BC = ranked_BC[:, : self._top] == targets[:, None]
        counts = [hits_BC[:, 0], hits_BC.any(dim=1), targets != NO_CLASS]
        return torch.stack(counts, dim=1).to(torch.float64)

    def scores(self, totals: Sequence[float]) -> Mapping[str, float]:
        *hits, known = totals
        if not known:
            raise ConfigError(
                f"none of the {self.num_test:,} images to be judged by can be decoded; put good "
                "ones in their place"
            )
        names = [measure.name for measure in self.measures]
        return dict(zip(names, [count / known for count in hits], strict=False))

    @torch.no_grad()
    def predict(self, model: nn.Module, inputs: Sequence[str]) -> Iterator[str]:
        """Yield the name, the class and its probability of image files, with tabs between.

        Without inputs, all test images follow, each with its true class too.
        """
        for name in inputs:
            yield self._told(name, model(self._images.view(name)[None])[0])
        number = itertools.count()
        for images, targets in self.tests(range(self.num_test)) if not inputs else ():
            for outputs_C, target in zip(model(images), targets.tolist(), strict=True):
                truth = "cannot be decoded" if target == NO_CLASS else self._images.classes[target]
                yield f"{self._told(self._images.test_name(next(number)), outputs_C)}\t{truth}"

    def _told(self, name: str, outputs_C: Tensor) -> str:
        share, number = outputs_C.softmax(0).max(0)
        return f"{name}\t{self._images.classes[int(number)]}\t{percent_text(float(share))}"

    def remarks(self) -> Iterator[str]:
        images = self._images
        yield (
            f"{images.num_train:,} images in {len(images.classes)} classes to learn from, "
            f"{images.num_test:,} to be judged by"
        )
        if images.skipped:
            yield f"skipped, since they are no images: {len(images.skipped):,} ({SKIPPED})"

    @property
    def data_digest(self) -> str:
        return self._images.digest

    @property
    def skipped(self) -> Sequence[str]:
        return self._images.skipped

    def begin_step(self, model: nn.Module, progress: float) -> None:
        if isinstance(self._recipe.model, AmoebaNet):
            set_drop_path_progress(model, progress)


def open_images(section: ImageSection) -> ImageSet:
    """Open the images of a recipe.

    Raises:
        ConfigError: they cannot be read.
    """
    if isinstance(section, Digits):
        return digit_images(**section.options())
    return ViewedImageSet(
        image_folders(section.path, strict=section.strict),
        TrainingView(
            size=section.size,
            area=(section.least_area, 1.0),
            flip=section.flip,
            colour=section.colour,
            policy=section.policy,
            magnitude=section.magnitude,
            cutout=section.cutout,
        ),
        EvaluationView(
            size=section.size, share=section.test_share, squeezed=section.test_squeezed
        ),
        num_workers=section.num_workers,
        strict=section.strict,
    )


def make_network(recipe: Recipe, images: ImageSet) -> nn.Module:
    """Build the recipe's network for these images."""
    sizes = {"in_channels": images.channels, "num_classes": len(images.classes)}
    match recipe.model:
        case Residual() as r:
            return residual_network(**r.options(), **sizes)
        case AmoebaNet() as a:
            build = {"b": amoebanet_b, "d": amoebanet_d}[a.genotype]
            return build(
                a.num_layers,
                a.num_filters,
                **sizes,
                image_size=images.size,
                dropout=a.dropout,
                drop_path=a.drop_path,
                auxiliary=a.auxiliary_weight > 0,
                small=a.stem == "small",
                norm_momentum=1 - a.norm_decay,
                norm_epsilon=a.norm_epsilon,
            )
        case other:
            raise RecipeError(
                f'model.name = "{other.name}" is not made for images, data.name = '
                f'"{recipe.data.name}"; choose residual or amoebanet'
            )
