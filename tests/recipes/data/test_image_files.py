"""Images are read as they were stored; what is missing, empty or damaged is named."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from penstock.errors import ConfigError
from penstock_recipes.data.images import image_folders

Pixels = npt.NDArray[np.uint8]


def colours(width: int = 5, height: int = 4, seed: int = 0) -> Pixels:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(file: Path, pixels: Pixels | None = None) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(colours() if pixels is None else pixels).save(file)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two classes, with two images each to learn from and one to be judged by."""
    for name in ("zebra", "ant"):
        for file in ("1.png", "0.JPEG"):
            save(tmp_path / "train" / name / file)
        save(tmp_path / "val" / name / "0.webp")
    return tmp_path


def test_classes_are_numbered_by_name_and_files_found_in_order(tree: Path) -> None:
    split = image_folders(tree)
    assert split.train.classes == split.test.classes == ("ant", "zebra")
    found = [(split.train.name(n), split.train.target(n)) for n in range(len(split.train))]
    expected = [("ant/0.JPEG", 0), ("ant/1.png", 0), ("zebra/0.JPEG", 1), ("zebra/1.png", 1)]
    assert found == [(str(tree / "train" / file), target) for file, target in expected]
    assert [split.test.target(n) for n in range(len(split.test))] == [0, 1]
    assert split.skipped == ()


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK"])
def test_every_kind_of_image_becomes_rgb(tree: Path, mode: str) -> None:
    file = tree / "train" / "ant" / ("2.jpg" if mode == "CMYK" else "2.png")
    grey = np.full((4, 5, 3), 102, np.uint8)
    Image.fromarray(grey).convert(mode).save(file)
    image = image_folders(tree).train.read(2)
    assert image.mode == "RGB" and image.size == (5, 4)
    assert np.abs(np.array(image).astype(int) - 102).max() <= 2


def test_grey_of_16_bits_is_scaled_to_8(tree: Path) -> None:
    """0 is black, 65535 white, and 257 steps of 16 bits are one of 8."""
    values = np.array([[0, 128, 129, 257, 32896, 65535]], np.uint16)
    Image.fromarray(values).save(tree / "train" / "ant" / "2.png")
    image = image_folders(tree).train.read(2)
    assert image.mode == "RGB"
    assert np.array(image)[0].tolist() == [[v] * 3 for v in (0, 0, 1, 1, 128, 255)]


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_values_without_a_known_white_are_not_guessed(tree: Path, kind: Any) -> None:
    file = tree / "train" / "ant" / "2.png"  # Pillow goes by content
    Image.fromarray(np.ones((4, 5), kind)).save(file, "TIFF")
    assert image_folders(tree).train.read(2) is None


def test_pixels_are_those_of_the_file(tree: Path) -> None:
    assert np.array_equal(np.array(image_folders(tree).train.read(1)), colours())


def test_without_val_there_is_test(tree: Path) -> None:
    (tree / "val").rename(tree / "test")
    assert image_folders(tree).test.name(0) == str(tree / "test" / "ant" / "0.webp")


def test_what_is_no_image_by_its_name_is_passed_over(tree: Path) -> None:
    for name in ("notes.txt", "._0.jpg", ".hidden.png"):
        (tree / "train" / "ant" / name).write_text("?")
    (tree / "train" / ".cache").mkdir()
    split = image_folders(tree)
    assert len(split.train) == 4 and split.skipped == ()


def test_files_that_are_no_images_are_skipped_and_named_or_refused(tree: Path) -> None:
    bad = [tree / "train" / "ant" / "9.jpg", tree / "val" / "zebra" / "9.png"]
    bad[0].write_text("<html>404</html>")
    bad[1].write_bytes(b"")
    split = image_folders(str(tree))
    assert split.skipped == tuple(map(str, bad))
    assert (len(split.train), len(split.test)) == (4, 2)
    with pytest.raises(ConfigError, match=r"2 files are no images: .*9\.jpg, .*9\.png\. Remove"):
        image_folders(tree, strict=True)


def test_an_image_that_is_cut_short_cannot_be_decoded(tree: Path) -> None:
    file = tree / "train" / "ant" / "0.JPEG"
    save(file, colours(64, 64))
    file.write_bytes(file.read_bytes()[:-900])
    train = image_folders(tree).train
    assert train.read(0) is None
    assert train.read(1) is not None


def test_an_image_that_is_gone_is_no_damaged_one(tree: Path) -> None:
    train = image_folders(tree).train
    (tree / "train" / "ant" / "0.JPEG").unlink()
    with pytest.raises(FileNotFoundError):
        train.read(0)
    (tree / "train" / "ant" / "0.JPEG").mkdir()
    with pytest.raises(IsADirectoryError):
        train.read(0)


CLASSES = {part: {"zebra": "0.png", "ant": "0.png"} for part in ("train", "val")}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"train": CLASSES["train"]}, "neither a folder val nor a folder test; put"),
    ({"val": CLASSES["val"]}, "the folder of training images .*train does not exist"),
    (
        {"train": CLASSES["train"], "val": "ILSVRC2012_val_00000001.JPEG"},
        "val has no class folders; give each class a folder",
    ),
    (
        {"train": {"photos": "ant.png"}, "val": {"photos": "ant.png"}},
        "train has 1 class, 'photos', and a model needs",
    ),
    (
        {"train": {"photos": CLASSES["train"]}, "val": CLASSES["val"]},
        "'photos', .* one folder too deep",
    ),
    (
        CLASSES | {"train": {**CLASSES["train"], "bee": "0.gif"}},
        r"1 classes .* no images .*: bee\. ",
    ),
    (
        CLASSES | {"train": {**CLASSES["train"], "bee": "empty.jpg"}},
        r" no images: .*bee/empty\.jpg",
    ),
    (
        CLASSES | {"val": CLASSES["val"] | {f"new{n}": "0.png" for n in range(7)}},
        "val has 7 classes that .*train lacks: new0, .* and 2",
    ),
]


def plant(folder: Path, content: Any) -> None:
    """Make folders, and an image for each name of one; "empty" is none."""
    if isinstance(content, str):
        save(folder / content)
        if "empty" in content or content.endswith(".gif"):
            (folder / content).write_text("")
        return
    for name, inside in content.items():
        plant(folder / name, inside)


@pytest.mark.parametrize(("content", "words"), REFUSED)
def test_what_is_no_folder_of_images_is_refused(tmp_path, content, words) -> None:
    plant(tmp_path, content)
    with pytest.raises(ConfigError, match=words):
        image_folders(tmp_path)


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(ConfigError, match="the data folder /nowhere does not exist; images are"):
        image_folders("/nowhere")


def test_a_test_folder_may_lack_classes(tree: Path) -> None:
    (tree / "val" / "ant" / "0.webp").unlink()
    (tree / "val" / "ant").rmdir()
    test = image_folders(tree).test
    assert test.classes == ("ant", "zebra") and test.target(0) == 1


def test_without_pillow_the_error_names_the_extra(tree, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"need PIL, .*pip install 'penstock-recipes\[images\]'"):
        image_folders(tree)
