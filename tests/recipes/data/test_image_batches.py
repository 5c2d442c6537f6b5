"""Batches are the same from any worker and after any stop; what cannot be decoded is named."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from penstock.errors import ConfigError
from penstock_recipes.data import epoch_order
from penstock_recipes.data.images import (
    EvaluationView,
    ImageLoader,
    TrainingView,
    ViewedImages,
    image_folders,
)
from penstock_recipes.data.images.batches import Batch
from penstock_recipes.data.images.folders import FolderImages

VIEW = TrainingView(size=8, policy="randaugment", colour=0.5, cutout=0.3)
NUM_IMAGES = 11


@dataclass(frozen=True)
class Made:
    """Images whose class is their number, but for those that are damaged."""

    damaged: frozenset[int] = frozenset()
    num_images: int = NUM_IMAGES
    classes: tuple[str, ...] = tuple(map(str, range(NUM_IMAGES)))

    def __len__(self) -> int:
        return self.num_images

    def target(self, index: int) -> int:
        return index

    def name(self, index: int) -> str:
        return f"image {index}"

    def read(self, index: int) -> Any:
        if index in self.damaged:
            return None
        rng = np.random.default_rng(index)
        return Image.fromarray(rng.integers(0, 256, (12, 15, 3), dtype=np.uint8))

    def digest(self) -> bytes:
        return b"made"


def viewed(
    made: Made, view: TrainingView | EvaluationView, *, strict: bool = False
) -> ViewedImages:
    return ViewedImages(cast(FolderImages, made), view, strict)


TRAINED = viewed(Made(), VIEW)


def assert_same(found: list[Batch], expected: list[Batch]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))


def targets(batches: list[Batch]) -> list[list[int]]:
    return [targets_B.tolist() for _, targets_B in batches]


def test_batches_follow_the_order_of_the_epoch() -> None:
    batches = list(ImageLoader(TRAINED, seed=3, batch_size=4).epoch(1))
    order = epoch_order(NUM_IMAGES, seed=3, epoch=1)
    assert targets(batches) == [part.tolist() for part in order.split(4)]
    assert [x.shape for x, _ in batches] == [(4, 3, 8, 8), (4, 3, 8, 8), (3, 3, 8, 8)]
    assert all(x.dtype == torch.float32 and y.dtype == torch.int64 for x, y in batches)


def test_an_image_looks_another_way_in_each_epoch_and_with_each_seed() -> None:
    loader = ImageLoader(TRAINED, seed=0, batch_size=NUM_IMAGES)
    other = ImageLoader(TRAINED, seed=1, batch_size=NUM_IMAGES)
    seen = []
    for batches in (loader.epoch(0), loader.epoch(1), other.epoch(0)):
        [(inputs_BCHW, targets_B)] = batches
        seen.append(inputs_BCHW[targets_B.argsort()])
    assert not any(torch.equal(seen[0][n], seen[1][n]) for n in range(NUM_IMAGES))
    assert not any(torch.equal(seen[0][n], seen[2][n]) for n in range(NUM_IMAGES))


def test_an_epoch_resumes_at_any_batch() -> None:
    loader = ImageLoader(TRAINED, seed=0, batch_size=4)
    whole = list(loader.epoch(2))
    for first_batch in range(loader.batches_per_epoch + 1):
        assert_same(list(loader.epoch(2, first_batch)), whole[first_batch:])
        other = ImageLoader(TRAINED, seed=0, batch_size=4)
        assert_same(list(other.epoch(2, first_batch)), whole[first_batch:])


@pytest.mark.slow
def test_workers_give_the_same_batches_also_after_an_epoch_that_was_left() -> None:
    alone = ImageLoader(TRAINED, seed=0, batch_size=2)
    helped = ImageLoader(TRAINED, seed=0, batch_size=2, num_workers=2)
    next(helped.epoch(0))
    assert_same(list(helped.epoch(1)), list(alone.epoch(1)))


def test_the_number_of_threads_changes_nothing() -> None:
    """RandAugment takes means over an image, which more threads round otherwise."""
    large = viewed(Made(), replace(VIEW, size=200))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(list(ImageLoader(large, 0, NUM_IMAGES).epoch(0)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert_same(found[0], found[1])


def test_making_batches_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    list(ImageLoader(TRAINED, 0, 4).epoch(0))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_evaluation_sees_every_image_once_in_order() -> None:
    loader = ImageLoader(viewed(Made(), EvaluationView(size=8)), seed=0, batch_size=4)
    assert targets(list(loader.in_order())) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_replicas_share_a_batch() -> None:
    whole = list(ImageLoader(TRAINED, seed=0, batch_size=4).epoch(0))
    halves = (lambda size: slice(size // 2), lambda size: slice(size // 2, None))
    parts = [list(ImageLoader(TRAINED, 0, 4, share=half).epoch(0)) for half in halves]
    joined = [
        (torch.cat([x, more_x]), torch.cat([y, more_y]))
        for (x, y), (more_x, more_y) in zip(*parts, strict=True)
    ]
    assert_same(joined, whole)
    last_of_four = ImageLoader(TRAINED, 0, 4, share=lambda size: slice(3, None))
    assert [len(row) for row in targets(list(last_of_four.epoch(0)))] == [1, 1, 0]


def test_the_next_image_stands_in_for_a_damaged_one_in_training() -> None:
    damaged = viewed(Made(damaged=frozenset({3, 4, 10})), VIEW)
    loader, whole = (ImageLoader(images, seed=0, batch_size=4) for images in (damaged, TRAINED))
    stand_in = {3: 5, 4: 5, 10: 0}
    expected = [[stand_in.get(n, n) for n in row] for row in targets(list(whole.epoch(0)))]
    assert targets(list(loader.epoch(0))) == expected
    assert sorted(loader.skipped) == ["image 10", "image 3", "image 4"]
    list(loader.epoch(1))
    assert len(loader.skipped) == 3


def test_a_damaged_image_is_blank_and_of_no_class_in_evaluation() -> None:
    images = Made(damaged=frozenset({0, 4, 5, 6, 7}))
    loader = ImageLoader(viewed(images, EvaluationView(size=8)), seed=0, batch_size=4)
    batches = list(loader.in_order())
    assert targets(batches) == [[-1, 1, 2, 3], [-1, -1, -1, -1], [8, 9, 10]]
    assert all(
        (row == 0).all() == (n == -1) for x, t in batches for row, n in zip(x, t, strict=True)
    )
    assert targets(list(loader.in_order([3, 0, 10]))) == [[3, -1, 10]]
    assert loader.skipped == [f"image {n}" for n in (0, 4, 5, 6, 7)]


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_damaged_image_is_refused_where_that_is_asked(num_workers: int) -> None:
    images = viewed(Made(damaged=frozenset({3})), VIEW, strict=True)
    with pytest.raises(ConfigError, match=r"^image 3 cannot be decoded; remove or replace it"):
        list(ImageLoader(images, 0, 4, num_workers).epoch(0))


def test_nothing_but_damaged_images_is_refused() -> None:
    images = viewed(Made(damaged=frozenset(range(NUM_IMAGES))), VIEW)
    with pytest.raises(ConfigError, match="none of the 11 images can be decoded"):
        list(ImageLoader(images, 0, 4).epoch(0))


def test_numbers_out_of_bounds_are_refused() -> None:
    for sizes in ((0, 0), (4, -1)):
        with pytest.raises(ConfigError, match="give a batch size from 1 up, and 0 workers"):
            ImageLoader(TRAINED, 0, *sizes)
    with pytest.raises(ConfigError, match="there are no images to make batches of"):
        ImageLoader(viewed(Made(num_images=0), VIEW), 0, 4)


def test_a_folder_of_images_goes_into_batches(tmp_path: Path) -> None:
    for part, name in ((part, name) for part in ("train", "val") for name in "ab"):
        (tmp_path / part / name).mkdir(parents=True)
        Made().read(0).save(tmp_path / part / name / "0.png")
        Made().read(1).save(tmp_path / part / name / "1.png")
    (tmp_path / "train" / "a" / "1.png").write_bytes(
        (tmp_path / "train" / "a" / "1.png").read_bytes()[:300]
    )
    split = image_folders(tmp_path)
    loader = ImageLoader(ViewedImages(split.train, VIEW), seed=0, batch_size=4)
    [(inputs_BCHW, targets_B)] = loader.epoch(0)
    assert inputs_BCHW.shape == (4, 3, 8, 8) and sorted(targets_B.tolist()) == [0, 1, 1, 1]
    assert loader.skipped == [str(tmp_path / "train" / "a" / "1.png")]
    assert targets(list(ImageLoader(ViewedImages(split.test, VIEW), 0, 4).in_order())) == [
        [0, 0, 1, 1]
    ]
