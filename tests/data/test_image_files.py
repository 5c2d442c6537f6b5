"""Images are read as they were stored; what is missing, empty or damaged is named."""

import pickle
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from penstock.data.images import ImageSplit, image_folders, load_cifar
from penstock.errors import ConfigError

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
        "class, 'photos', .* one folder too deep, or too shal",
    ),
    (
        CLASSES | {"train": {**CLASSES["train"], "bee": "0.gif"}},
        r"1 classes of .*train have no images \(.*\): bee\. ",
    ),
    (
        CLASSES | {"train": {**CLASSES["train"], "bee": "empty.jpg"}},
        r"bee; 1 files there are no images: .*bee/empty\.jpg\.",
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
def test_what_is_no_folder_of_images_is_refused(
    tmp_path: Path, content: dict[str, Any], words: str
) -> None:
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


def test_without_pillow_the_error_names_the_extra(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"need PIL, .*pip install 'penstock\[images\]'"):
        image_folders(tree)


def python_2_pickle(value: Any) -> bytes:
    """Pickle as Python 2 did, with text as bytes without a type: what CIFAR's files are."""

    def dump(value: Any) -> bytes:
        match value:
            case dict():
                items = b"".join(dump(key) + dump(item) for key, item in value.items())
                return b"}(" + items + b"u"
            case list():
                return b"](" + b"".join(map(dump, value)) + b"e"
            case bytes():
                return b"T" + struct.pack("<i", len(value)) + value
            case int():
                return b"J" + struct.pack("<i", value)
            case np.ndarray():
                shape = b"".join(map(dump, value.shape))
                made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
                kind = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
                kind += b"(K\x03U\x01|NNN" + dump(-1) + dump(-1) + b"K\x00tb"
                return (
                    made
                    + b"(K\x01("
                    + shape
                    + b"t"
                    + kind
                    + b"\x89"
                    + dump(value.tobytes())
                    + b"tb"
                )
        raise AssertionError(value)

    return b"\x80\x02" + dump(value) + b"."


NAMES = {"cifar10": [f"kind{n}" for n in range(10)], "cifar100": [f"kind{n}" for n in range(100)]}
TRAIN = {"cifar10": [f"data_batch_{n}" for n in range(1, 6)], "cifar100": ["train"]}
TEST = {"cifar10": "test_batch", "cifar100": "test"}
FOLDERS = {
    ("cifar10", "binary"): "cifar-10-batches-bin",
    ("cifar10", "python"): "cifar-10-batches-py",
    ("cifar100", "binary"): "cifar-100-binary",
    ("cifar100", "python"): "cifar-100-python",
}


def batch_of(file: str, name: str) -> tuple[Pixels, list[int]]:
    """Give two images, (2, 3072), and their classes, for one file."""
    rng = np.random.default_rng(len(file) + ord(file[-1]))
    pixels = rng.integers(0, 256, (2, 3072), dtype=np.uint8)
    return pixels, rng.integers(0, len(NAMES[name]), 2).tolist()


def write_cifar(root: Path, name: str, kind: str) -> Path:
    folder = root / FOLDERS[name, kind]
    folder.mkdir(parents=True)
    for file in [*TRAIN[name], TEST[name]]:
        pixels, labels = batch_of(file, name)
        if kind == "binary":
            coarse = b"\x07" if name == "cifar100" else b""
            rows = [
                coarse + bytes([n]) + row.tobytes() for n, row in zip(labels, pixels, strict=True)
            ]
            (folder / f"{file}.bin").write_bytes(b"".join(rows))
        else:
            key = b"labels" if name == "cifar10" else b"fine_labels"
            content = {b"batch_label": b"?", key: labels, b"data": pixels}
            (folder / file).write_bytes(python_2_pickle(content))
    if kind == "binary":
        text = "batches.meta.txt" if name == "cifar10" else "fine_label_names.txt"
        (folder / text).write_text("\n".join(NAMES[name]) + "\n\n")
    else:
        file, key = (
            ("batches.meta", b"label_names")
            if name == "cifar10"
            else ("meta", b"fine_label_names")
        )
        names = [name.encode() for name in NAMES[name]]
        (folder / file).write_bytes(python_2_pickle({key: names}))
    return folder


def content(split: ImageSplit, part: str) -> list[tuple[bytes, int]]:
    images = getattr(split, part)
    return [
        (np.array(images.read(n)).transpose(2, 0, 1).tobytes(), images.target(n))
        for n in range(len(images))
    ]


@pytest.mark.parametrize("kind", ["binary", "python"])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_both_kinds_of_cifar_files_are_read(tmp_path: Path, name: str, kind: str) -> None:
    folder = write_cifar(tmp_path, name, kind)
    for root in (folder, tmp_path, str(tmp_path)):
        split = load_cifar(root, name)
        assert split.train.classes == split.test.classes == tuple(NAMES[name])
        for part, files in (("train", TRAIN[name]), ("test", [TEST[name]])):
            rows = [zip(*batch_of(file, name), strict=True) for file in files]
            expected = [(pixels.tobytes(), label) for row in rows for pixels, label in row]
            assert content(split, part) == expected
    assert split.train.name(1) == f"{folder}, train[1]"


def test_what_later_versions_pickle_is_read_too(tmp_path: Path) -> None:
    folder = write_cifar(tmp_path, "cifar10", "python")
    pixels, labels = batch_of("test_batch", "cifar10")
    (folder / "test_batch").write_bytes(
        pickle.dumps({b"data": pixels, b"labels": labels}, protocol=4)
    )
    assert content(load_cifar(tmp_path), "test")[0] == (pixels[0].tobytes(), labels[0])


def test_a_pickle_cannot_run_anything(tmp_path: Path) -> None:
    folder = write_cifar(tmp_path, "cifar10", "python")
    trace = tmp_path / "trace"
    (folder / "test_batch").write_bytes(f"cos\nmkdir\n(V{trace}\ntR.".encode())
    with pytest.raises(ConfigError, match=r"test_batch cannot be read: it asks for os\.mkdir"):
        load_cifar(tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1], "holds a list, no batch of images"),
        ({b"data": [1], b"labels": [1]}, "does not hold one class and 3,072 bytes"),
        ({b"labels": [1]}, "does not hold one class and 3,072 bytes"),
        ({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}, "has class 10, and classes"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, "does not hold one class"),
    ],
)
def test_pickles_of_something_else_are_refused(tmp_path: Path, value: Any, message: str) -> None:
    folder = write_cifar(tmp_path, "cifar10", "python")
    (folder / "data_batch_3").write_bytes(pickle.dumps(value))
    with pytest.raises(ConfigError, match=f"data_batch_3 {message}"):
        load_cifar(tmp_path)


def test_damaged_cifar_files_are_refused(tmp_path: Path) -> None:
    binary = write_cifar(tmp_path / "binary", "cifar10", "binary")
    file = binary / "data_batch_2.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"has 6,145 bytes, no multiple of the 3,073 of one"):
        load_cifar(binary)
    file.write_bytes(b"\x0a" + bytes(3072))
    with pytest.raises(ConfigError, match="has class 10, and classes go from 0 to 9"):
        load_cifar(binary)
    file.unlink()
    with pytest.raises(ConfigError, match=r"data_batch_2\.bin cannot be read \(No such file"):
        load_cifar(binary)
    (binary / "batches.meta.txt").write_text("cat dog")
    with pytest.raises(ConfigError, match="names 2 classes, and cifar10 has 10"):
        load_cifar(binary)
    python = write_cifar(tmp_path / "python", "cifar10", "python")
    (python / "test_batch").write_bytes((python / "test_batch").read_bytes()[:40])
    with pytest.raises(ConfigError, match="test_batch cannot be read: pickle data was truncated"):
        load_cifar(python)


def test_missing_cifar_is_said_with_where_to_find_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither cifar-10-batches-bin nor .*kriz/cifar\.html"):
        load_cifar(tmp_path)
    with pytest.raises(ConfigError, match="name='cifar' is not known; choose one of 'cifar10'"):
        load_cifar(tmp_path, "cifar")
