"""Images are judged as the recipe says, by the best guess and the best five."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from penstock_recipes.recipe.data_sections import ImageFolder
from penstock_recipes.recipe.read import read_recipe
from penstock_recipes.train.tasks import build_task
from penstock_recipes.train.tasks.images import open_images
from tests.digits import DIGITS


def test_wide_images_can_be_judged_as_they_are_learnt(tmp_path: Path) -> None:
    pixels_HWC = np.zeros((100, 300, 3), np.uint8)
    pixels_HWC[:, :100, 0] = pixels_HWC[:, 200:, 0] = 255
    for file in ("train/car/0.png", "train/boat/0.png", "val/car/0.png"):
        (tmp_path / file).parent.mkdir(parents=True)
        Image.fromarray(pixels_HWC).save(tmp_path / file)

    def seen(squeezed: bool) -> list[torch.Tensor]:
        section = ImageFolder(
            name="image_folder",
            path=str(tmp_path),
            size=30,
            num_workers=0,
            least_area=1.0,
            flip=0.0,
            colour=0.0,
            test_share=1.0,
            test_squeezed=squeezed,
        )
        images = open_images(section)
        [(learnt, _, _)] = images.batches(0, 0, 0, 2, slice)
        [(judged, _)] = images.tests([0], 2)
        return [learnt[0], judged[0]]

    assert torch.equal(*seen(squeezed=True))
    assert not torch.equal(*seen(squeezed=False))


def test_the_class_counts_if_it_is_among_the_best() -> None:
    tally = build_task(read_recipe(DIGITS)).tally
    outputs = torch.arange(10.0).expand(4, -1)
    assert tally(outputs, torch.tensor([9, 5, 4, -1])).tolist() == [
        *([1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0]),
    ]


def test_a_model_that_knows_nothing_is_right_as_often_as_chance() -> None:
    tally = build_task(read_recipe(DIGITS)).tally
    for value in (0.0, float("nan")):
        counts = tally(torch.full((10, 10), value), torch.arange(10))
        assert counts.sum(dim=0).tolist() == [1, 5, 10]
