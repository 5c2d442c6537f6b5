"""Images with their classes: training batches in a seeded order, and test images."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from penstock_recipes.data import batch_indices, epoch_order, keyed_generator, num_batches

from .digits import Samples, Split, load_digits, of_each_class
from .images import EvaluationView, ImageLoader, ImageSplit, TrainingView, ViewedImages, read_image


def epoch_shifts(num_samples: int, seed: int, epoch: int, max_shift: int) -> Tensor:
    """Draw each sample's shift (rows down, columns right), in -max_shift..max_shift.

    int64, (num_samples, 2).
    """
    generator = keyed_generator(seed, "shift", epoch)
    return torch.randint(-max_shift, max_shift + 1, (num_samples, 2), generator=generator)


def shift_images(images_BCHW: Tensor, shifts_B2: Tensor) -> Tensor:
    """Move each image by its shift; the uncovered border is zero."""
    height, width = images_BCHW.shape[-2:]
    rows = torch.arange(height) - shifts_B2[:, :1]  # (B, H): the source of each row
    columns = torch.arange(width) - shifts_B2[:, 1:]
    rows_inside, columns_inside = (rows >= 0) & (rows < height), (columns >= 0) & (columns < width)
    inside = rows_inside[:, None, :, None] & columns_inside[:, None, None, :]
    batch = torch.arange(len(images_BCHW))[:, None, None]
    row_index = rows.clamp(0, height - 1)[:, :, None]
    column_index = columns.clamp(0, width - 1)[:, None, :]
    moved_BHWC = images_BCHW.permute(0, 2, 3, 1)[batch, row_index, column_index]
    return moved_BHWC.permute(0, 3, 1, 2).contiguous() * inside


Share = Callable[[int], slice]
"""Number of samples of a batch -> the slice of them that is wanted."""


class ImageSet(ABC):
    """Training and test images.

    The training order is a function of (seed, epoch), and the augmentation of (seed, epoch, number
    of the image).  So batch b of an epoch is the same whenever it is made.
    """

    classes: tuple[str, ...]
    channels: int
    size: int
    """Pixels of each side."""
    num_train: int
    num_test: int

    @abstractmethod
    def example(self, num_samples: int) -> Tensor:
        """Return `num_samples` training images: float32, (B, channels, H, W)."""

    @abstractmethod
    def batches(
        self, seed: int, epoch: int, first: int, batch_size: int, share: Share
    ) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield the batches of an epoch from number `first` on.

        Each has the samples that `share` picks, their classes, and the size of the whole batch.
        """

    @abstractmethod
    def tests(self, samples: Sequence[int], batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield these test images in order with their classes; an undecodable one has class -1."""

    @abstractmethod
    def view(self, path: str) -> Tensor:
        """Read an image file as test images are seen: float32, (channels, H, W).

        Raises:
            ConfigError: it cannot be read.
        """

    @abstractmethod
    def test_name(self, index: int) -> str:
        """Return the name of a test image."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """A digest of the images, their order and their classes."""

    @property
    def skipped(self) -> Sequence[str]:
        """The names of the images that could not be decoded so far."""
        return ()


class TensorImageSet(ImageSet):
    """Images in memory; training images are shifted by up to `max_shift` pixels."""

    def __init__(self, split: Split, classes: Sequence[str], max_shift: int = 0) -> None:
        self._train, self._test, self._max_shift = split.train, split.test, max_shift
        self.classes = tuple(classes)
        _, self.channels, self.size, _ = split.train.inputs.shape
        self.num_train, self.num_test = len(split.train), len(split.test)

    @property
    def digest(self) -> str:
        digest = blake2b(repr(self.classes).encode())
        for part in (self._train, self._test):
            for tensor in (part.inputs, part.targets):
                digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def example(self, num_samples: int) -> Tensor:
        return self._train.inputs[:num_samples]

    def batches(
        self, seed: int, epoch: int, first: int, batch_size: int, share: Share
    ) -> Iterator[tuple[Tensor, Tensor, int]]:
        shifts = epoch_shifts(self.num_train, seed, epoch, self._max_shift)
        order = epoch_order(self.num_train, seed, epoch)
        for batch in range(first, num_batches(self.num_train, batch_size)):
            whole = batch_indices(order, batch, batch_size)
            chosen = whole[share(len(whole))]
            inputs = shift_images(self._train.inputs[chosen], shifts[chosen])
            yield inputs, self._train.targets[chosen], len(whole)

    def tests(self, samples: Sequence[int], batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.tensor(samples, dtype=torch.int64).split(batch_size):
            yield self._test.inputs[chosen], self._test.targets[chosen]

    def view(self, path: str) -> Tensor:
        """Read an image file: grey, from 0 (black) to 1, resized to the size of the others."""
        image = read_image(path, "L").resize((self.size, self.size))
        pixels_HW = torch.from_numpy(np.array(image)).to(torch.float32).div(255)
        return pixels_HW.expand(self.channels, -1, -1)

    def test_name(self, index: int) -> str:
        return f"test image {index}"


class ViewedImageSet(ImageSet):
    """Images in files, decoded and augmented by worker processes."""

    def __init__(
        self,
        split: ImageSplit,
        train_view: TrainingView,
        test_view: EvaluationView,
        *,
        num_workers: int = 0,
        strict: bool = False,
    ) -> None:
        self._train = ViewedImages(split.train, train_view, strict)
        self._test = ViewedImages(split.test, test_view, strict)
        self._not_images, self._num_workers = split.skipped, num_workers
        self.classes, self.channels, self.size = split.train.classes, 3, train_view.size
        self.num_train, self.num_test = len(split.train), len(split.test)
        self._loader: ImageLoader | None = None
        self._test_loader: ImageLoader | None = None

    @property
    def digest(self) -> str:
        images = (self._train.images, self._test.images)
        return blake2b(b"".join(part.digest() for part in images)).hexdigest()

    def example(self, num_samples: int) -> Tensor:
        return torch.zeros(min(num_samples, self.num_train), self.channels, self.size, self.size)

    def batches(
        self, seed: int, epoch: int, first: int, batch_size: int, share: Share
    ) -> Iterator[tuple[Tensor, Tensor, int]]:
        if self._loader is None:  # its workers live on from epoch to epoch
            self._loader = ImageLoader(self._train, seed, batch_size, self._num_workers, share)
        for number, batch in enumerate(self._loader.epoch(epoch, first), first):
            yield *batch, min(batch_size, self.num_train - number * batch_size)

    def tests(self, samples: Sequence[int], batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        if self._test_loader is None:
            self._test_loader = ImageLoader(self._test, 0, batch_size, self._num_workers)
        return self._test_loader.in_order(samples)

    def view(self, path: str) -> Tensor:
        return self._test.view(read_image(path))

    def test_name(self, index: int) -> str:
        return self._test.images.name(index)

    @property
    def skipped(self) -> Sequence[str]:
        loaders = [loader for loader in (self._loader, self._test_loader) if loader is not None]
        return [*self._not_images, *(name for loader in loaders for name in loader.skipped)]


# name -> classes, and the function from digits to their numbers
_LABELS: dict[str, tuple[tuple[str, ...], Callable[[Tensor], Tensor]]] = {
    "digit": (tuple("0123456789"), lambda digits: digits),
    "parity": (("even", "odd"), lambda digits: digits % 2),
    "half": (("0 to 4", "5 to 9"), lambda digits: digits // 5),
}


def digit_images(
    labels: str = "digit",
    *,
    size: int = 8,
    train_share: float = 1.0,
    test_share: float = 0.2,
    max_shift: int = 0,
    seed: int = 0,
) -> TensorImageSet:
    """Read the handwritten digits: float32, (N, 1, size, size), from 0 to 1.

    Args:
        labels: the classes: `digit`, its `parity`, or the `half` of 0 to 9 that it is in.
        size: pixels of each side; the originals have 8 and are enlarged (bilinear).
        train_share: share of the training images to use, the same for each digit.
        test_share, seed: see `load_digits`.
        max_shift: maximal shift of training images, in pixels.

    Raises:
        ConfigError: scikit-learn is not installed, or `test_share` is not between 0 and 1.
    """
    split = load_digits(test_share, seed)
    classes, label = _LABELS[labels]
    is_kept = of_each_class(split.train.targets, train_share, seed, "share", least=1)
    train = Samples(split.train.inputs[is_kept], split.train.targets[is_kept])

    def prepared(part: Samples) -> Samples:
        inputs = part.inputs
        if inputs.shape[-1] != size:
            inputs = F.interpolate(inputs, size=(size, size), mode="bilinear", align_corners=False)
        return Samples(inputs, label(part.targets))

    return TensorImageSet(Split(prepared(train), prepared(split.test)), classes, max_shift)
