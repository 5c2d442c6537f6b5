"""Augmentation is what its key says; evaluation sees the middle."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from penstock.errors import ConfigError
from penstock_recipes.data.images import EvaluationView, TrainingView

PLAIN: dict[str, Any] = {"mean": (0.0, 0.0, 0.0), "deviation": (1.0, 1.0, 1.0)}
WHOLE: dict[str, Any] = {"area": (1.0, 1.0), "flip": 0.0, **PLAIN}


def image(width: int = 40, height: int = 30) -> Image.Image:
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def squares() -> Image.Image:
    """Give 8 x 8 pixels of which the middle 4 x 4 are white."""
    array = np.zeros((8, 8, 3), np.uint8)
    array[2:6, 2:6] = 255
    return Image.fromarray(array)


EVERYTHING = [
    TrainingView(size=16),
    TrainingView(size=16, colour=1.0, cutout=0.5),
    TrainingView(size=16, policy="randaugment", num_operations=3, magnitude=20),
    TrainingView(size=16, policy="autoaugment"),
]


@pytest.mark.parametrize("view", EVERYTHING, ids=["crop", "colour", "randaugment", "autoaugment"])
def test_the_key_decides_and_nothing_else(view: TrainingView) -> None:
    first = [view(image(), 0, "augment", 1, n) for n in range(20)]
    state = torch.random.get_rng_state()
    torch.rand(7)
    second = [view(image(), 0, "augment", 1, n) for n in reversed(range(20))]
    assert all(map(torch.equal, first, reversed(second)))
    assert not torch.equal(torch.random.get_rng_state(), state)
    assert all(x.shape == (3, 16, 16) and x.dtype == torch.float32 for x in first)
    assert not any(x.requires_grad for x in first)
    for other in ((1, "augment", 1, 0), (0, "augment", 2, 0), (0, "augment", 1, 1)):
        assert not torch.equal(view(image(), *other), first[0])


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    for view in EVERYTHING:
        view(image(), 0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_whole_image_is_seen_when_the_area_is_all() -> None:
    view = TrainingView(size=30, **WHOLE)
    assert torch.equal(view(image(30, 30), 0), pixels(image(30, 30)))
    assert view(image(60, 7), 0).shape == (3, 30, 30)


def test_crops_have_the_asked_share_of_the_image() -> None:
    """On an image whose value is its column, the range of values tells the crop's width."""
    rows = np.tile(np.arange(200, dtype=np.uint8), (200, 1))
    ramp = Image.fromarray(np.stack([rows, rows.T, rows], 2))
    view = TrainingView(size=64, area=(0.25, 0.5), flip=0.0, **PLAIN)
    shares = []
    for key in range(50):
        x_CHW = view(ramp, key) * 255
        width, height = (x_CHW[c].max() - x_CHW[c].min() for c in (0, 1))
        shares.append(float(width * height) / 200**2)
    assert 0.2 < min(shares) < 0.3 and 0.4 < max(shares) < 0.55


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (50, 1), (3, 200), (500, 40)])
def test_images_of_any_shape_are_cropped(size: tuple[int, int]) -> None:
    view = TrainingView(size=8)
    assert all(view(image(*size), key).isfinite().all() for key in range(50))


def test_about_half_of_the_images_are_flipped() -> None:
    view = TrainingView(size=30, area=(1.0, 1.0), **PLAIN)
    square = image(30, 30)
    seen = [view(square, key) for key in range(60)]
    flipped = [torch.equal(x, pixels(square).flip(2)) for x in seen]
    assert 15 <= sum(flipped) <= 45
    assert sum(torch.equal(x, pixels(square)) for x in seen) == 60 - sum(flipped)


def test_a_square_is_set_to_the_mean_wherever_its_centre_falls() -> None:
    view = TrainingView(size=20, area=(1.0, 1.0), cutout=0.5)
    white = Image.fromarray(np.full((20, 20, 3), 255, np.uint8))
    covered = [int((view(white, key)[0] == 0).sum()) for key in range(100)]
    assert max(covered) == 100 and 25 <= min(covered) < 50
    assert not (TrainingView(size=20, area=(1.0, 1.0))(white, 0) == 0).any()


def test_colours_move_further_with_strength() -> None:
    def moved(colour: float) -> float:
        view = TrainingView(size=30, colour=colour, **WHOLE)
        square = image(30, 30)
        return sum(float((view(square, key) - pixels(square)).abs().mean()) for key in range(20))

    assert moved(0.0) == 0 < moved(0.2) < moved(1.0)


def test_evaluation_sees_the_middle() -> None:
    view = EvaluationView(size=4, share=0.5, **PLAIN)
    assert torch.equal(view(squares()), torch.ones(3, 4, 4))
    assert torch.equal(EvaluationView(size=8, share=1.0, **PLAIN)(squares()), pixels(squares()))
    wide = Image.fromarray(np.pad(np.array(squares()), ((0, 0), (9, 9), (0, 0))))
    assert torch.equal(view(wide), torch.ones(3, 4, 4))


def test_a_squeezed_evaluation_sees_what_training_on_whole_images_does() -> None:
    pixels_HWC = np.zeros((100, 300, 3), np.uint8)
    pixels_HWC[:, :100, 0] = pixels_HWC[:, 200:, 0] = 255
    wide = Image.fromarray(pixels_HWC)
    judged = EvaluationView(size=30, share=1.0, squeezed=True, **PLAIN)(wide)
    assert torch.equal(judged, TrainingView(size=30, **WHOLE)(wide, 0))
    assert judged[0].mean().item() == pytest.approx(2 / 3, abs=0.01)
    assert EvaluationView(size=30, share=1.0, **PLAIN)(wide)[0].mean() < 0.01


def test_a_squeezed_evaluation_sees_the_share_of_both_sides() -> None:
    wide = Image.fromarray(np.repeat(np.array(squares()), 3, axis=1))
    x_CHW = EvaluationView(size=4, share=0.5, squeezed=True, **PLAIN)(wide)
    middle = wide.resize((4, 4), Image.Resampling.BILINEAR, box=(6, 2, 18, 6))
    assert torch.equal(x_CHW, pixels(middle)) and x_CHW.min() > 0.8


def test_inputs_are_normalised_by_channel() -> None:
    view = EvaluationView(size=2, mean=(0.0, 0.5, 1.0), deviation=(1.0, 0.5, 0.25))
    white = view(Image.fromarray(np.full((9, 9, 3), 255, np.uint8)))
    assert white.mean((1, 2)).tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size=0: give the pixels of a side"),
        ({"area": (0.0, 1.0)}, r"area=\(0\.0, 1\.0\): give two shares"),
        ({"area": (0.5, 0.1)}, r"area=\(0\.5, 0\.1\): give two shares"),
        ({"flip": 1.5}, r"flip=1\.5: give a number from 0 to 1"),
        ({"cutout": -0.1}, r"cutout=-0\.1: give a number from 0 to 1"),
        ({"colour": 3.0}, r"colour=3\.0: give a number from 0 to 2\.5"),
        ({"magnitude": 30}, "magnitude=30: give a number from 1 to 29"),
        ({"num_operations": 0}, "num_operations=0: give a number from 1 to"),
        ({"policy": "best"}, "policy='best' is not known; choose one of 'none', 'randaugment'"),
        ({"deviation": (1.0, 0.0, 1.0)}, r"deviation=\(1\.0, 0\.0, 1\.0\): give three numbers"),
    ],
)
def test_views_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingView(**{"size": 8, **options})


def test_without_kornia_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kornia", None)
    with pytest.raises(ConfigError, match=r"need kornia, .*penstock-recipes\[images\]"):
        TrainingView(size=8)
    EvaluationView(size=8)


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"share=0\.0: give a share above 0, up to 1"):
        EvaluationView(size=8, share=0.0)
