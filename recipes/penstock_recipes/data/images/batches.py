"""Load images in batches with worker processes; each image depends on (seed, epoch, sample) only.

A run resumes at any batch of any epoch, with any number of workers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from penstock.errors import ConfigError
from penstock_recipes.data import batch_indices, epoch_order, num_batches

from .folders import FolderImages
from .views import View

NO_CLASS = -1
"""The target of an image that cannot be decoded."""
Batch = tuple[Tensor, Tensor]
"""Inputs, float32, (B, 3, S, S), and targets, int64, (B,)."""


@dataclass(frozen=True, slots=True)
class ViewedImages:
    """Images and their augmentation.

    With `strict`, an image that cannot be decoded is an error; otherwise it is skipped.
    """

    images: FolderImages
    view: View
    strict: bool = False


class ImageLoader:
    """Loads batches of images; its worker processes live as long as it does.

    `skipped` has the names of the images that could not be decoded so far, each once.  In training
    the next good image replaces such an image; in evaluation it is blank, with target -1.  So
    batches keep their size.

    Only one epoch can be read at a time.  Workers are spawned, so a script with workers needs
    `if __name__ == "__main__":`.

    Args:
        dataset: the images, and their view.
        seed: the seed of the order and the augmentation.
        batch_size: samples of a batch; the last one of an epoch may have fewer.
        num_workers: processes that decode; 0: this process decodes.
        share: the slice of a training batch that this replica takes; default: all.

    Raises:
        ConfigError: there are no images, or a number is out of bounds.
    """

    def __init__(
        self,
        dataset: ViewedImages,
        seed: int,
        batch_size: int,
        num_workers: int = 0,
        share: Callable[[int], slice] = slice,
    ) -> None:
        if batch_size < 1 or num_workers < 0:
            raise ConfigError(
                f"batch_size={batch_size}, num_workers={num_workers}: give a batch size from 1 "
                "up, and 0 workers or more"
            )
        if not len(dataset.images):
            raise ConfigError("there are no images to make batches of")
        self.skipped: list[str] = []
        self._dataset, self._seed, self._batch_size = dataset, seed, batch_size
        self._share = share
        self._wanted = _Wanted()
        self._loader: DataLoader[Any] = DataLoader(
            _Decoder(dataset, seed),
            batch_sampler=self._wanted,
            num_workers=num_workers,
            collate_fn=_joined,
            generator=torch.Generator(),  # else making workers draws from the global one
            multiprocessing_context="spawn" if num_workers else None,  # threads may be running
            persistent_workers=num_workers > 0,
        )

    @property
    def batches_per_epoch(self) -> int:
        return num_batches(len(self._dataset.images), self._batch_size)

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch in its shuffled order, from number `first_batch` on.

        Raises:
            ConfigError: an image cannot be decoded, with `strict`; or no image at all can be.
        """
        order = epoch_order(len(self._dataset.images), self._seed, epoch)
        rows = self._rows(order)[first_batch:]
        return self._batches([row[self._share(len(row))] for row in rows], epoch)

    def in_order(self, samples: Sequence[int] | None = None) -> Iterator[Batch]:
        """Return these images in their order, or all images.

        Raises:
            ConfigError: an image cannot be decoded, with `strict`.
        """
        numbers = range(len(self._dataset.images)) if samples is None else samples
        chosen = torch.tensor(numbers, dtype=torch.int64)
        return self._batches(self._rows(chosen), None)

    def _rows(self, order: Tensor) -> list[Tensor]:
        numbers = range(num_batches(len(order), self._batch_size))
        return [batch_indices(order, number, self._batch_size) for number in numbers]

    def _batches(self, rows: list[Tensor], epoch: int | None) -> Iterator[Batch]:
        self._wanted.rows, self._wanted.epoch = rows, epoch
        for inputs_BCHW, targets_B, unreadable in self._loader:
            if unreadable:
                self.skipped = list(dict.fromkeys([*self.skipped, *unreadable]))
            if unreadable and self._dataset.strict:
                raise ConfigError(
                    f"{unreadable[0]} cannot be decoded; remove or replace it, or set strict to "
                    "false to go on without it"
                )
            if epoch is not None and NO_CLASS in targets_B:
                raise ConfigError(f"none of the {len(self._dataset.images)} images can be decoded")
            yield inputs_BCHW, targets_B


Place = tuple[int, int | None]
"""An image's number, and the epoch it is augmented for; None in evaluation."""
_Decoded = tuple[Tensor, Tensor, list[str]]


@dataclass(slots=True)
class _Wanted:
    """The samples of each batch to load next: int64, (B,)."""

    rows: list[Tensor] = field(default_factory=list)
    epoch: int | None = None

    def __iter__(self) -> Iterator[list[Place]]:
        return ([(index, self.epoch) for index in row.tolist()] for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class _Sample:
    """An augmented image; blank and without a class if it cannot be decoded."""

    input_CHW: Tensor
    target: int
    unreadable: tuple[str, ...]


class _Decoder(Dataset[_Sample]):
    """Decodes and augments with one thread, so that sums round as they do in a worker."""

    def __init__(self, dataset: ViewedImages, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, place: Place) -> _Sample:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._sample(*place)
        finally:
            torch.set_num_threads(threads)

    def _sample(self, index: int, epoch: int | None) -> _Sample:
        images = self._dataset.images
        unreadable: list[str] = []
        tries = 1 if epoch is None else len(images)
        for number in range(index, index + tries):
            place = number % len(images)
            image = images.read(place)
            if image is not None:
                view = self._dataset.view(image, self._seed, "augment", epoch, place)
                return _Sample(view, images.target(place), tuple(unreadable))
            unreadable.append(images.name(place))
        size = self._dataset.view.size
        return _Sample(torch.zeros(3, size, size), NO_CLASS, tuple(unreadable))


def _joined(samples: list[_Sample]) -> _Decoded:
    unreadable = [name for sample in samples for name in sample.unreadable]
    if not samples:  # this replica's share of a small batch
        return torch.empty(0), torch.empty(0, dtype=torch.int64), unreadable
    inputs_BCHW = torch.stack([sample.input_CHW for sample in samples])
    return inputs_BCHW, torch.tensor([sample.target for sample in samples]), unreadable
