"""Images in folders as ImageNet is unpacked: root/train/CLASS/*.jpg and root/val/CLASS/*.jpg."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import ConfigError

from .libraries import pillow

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")
TRAIN, TESTS = "train", ("val", "test")
MOST_NAMED = 5
"""An error names so many of what it is about."""


@dataclass(frozen=True, slots=True)
class FolderImages:
    """Images in files: `files[n]`, below `folder`, is of class number `targets[n]`.

    They can be sent to worker processes.
    """

    folder: str
    classes: tuple[str, ...]
    files: tuple[str, ...]
    targets: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.files)

    def target(self, index: int) -> int:
        """Return the class of an image."""
        return self.targets[index]

    def name(self, index: int) -> str:
        """Return the path of an image."""
        return str(Path(self.folder, self.files[index]))

    def read(self, index: int) -> Any:
        """Decode an image as RGB, unturned whatever its EXIF says; None if it is damaged.

        16-bit grey is scaled to 8 bits.  Other values of more than 8 bits have no black and white
        that a file would name, so such an image counts as damaged.

        Raises:
            OSError: the file is gone, or its disk or network fails: what may pass must not decide
                which images a run learns from.
        """
        library = pillow()
        try:
            with library.open(self.name(index)) as image:
                return _as_rgb(library, image)
        except _unreadable(library) as error:
            if isinstance(error, OSError) and error.errno is not None:  # Pillow's have no number
                raise
            return None

    def digest(self) -> bytes:
        """Tell these images, their order and their classes from others, wherever they are kept.

        By names: an image that was drawn anew under its name is the same.
        """
        return blake2b(repr((self.classes, self.files, self.targets)).encode()).digest()


@dataclass(frozen=True, slots=True)
class ImageSplit:
    """Images to learn from and images to be judged by, with the same classes.

    `skipped` names the files of both that are no images.
    """

    train: FolderImages
    test: FolderImages
    skipped: tuple[str, ...] = ()


def _as_rgb(library: Any, image: Any) -> Any:
    """Convert to 8-bit RGB; Pillow itself clips values of more than 8 bits to white."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        image.load()  # NumPy would hide what this raises
        values = np.asarray(image).astype(np.uint32)
        image = library.fromarray(((values + 128) // 257).astype(np.uint8))
    elif image.mode in ("I", "F"):
        return None
    return image.convert("RGB")


def image_folders(root: str | Path, *, strict: bool = False) -> ImageSplit:
    """Read root/train and root/val, or root/test if there is no val.

    Each holds a folder for each class, with .jpg, .jpeg, .png or .webp files right in it; all else
    is passed over, and so is what starts with a dot.  Classes are numbered in the order of
    their names in train; val may lack some of them.

    The beginning of each file is read here, about 10,000 files a second.  A file that is no image
    is skipped and named in the result; one that is damaged further on shows when it is decoded.

    Args:
        root: the folder that holds train, and val or test.
        strict: refuse files that are no images.

    Raises:
        ConfigError: a folder is missing; there is one class only, or a class has no images; val
            has a class that train lacks; a file is no image, with `strict`.
    """
    root = Path(root)
    train_folder = root / TRAIN
    _require_folder(root, "data folder")
    _require_folder(train_folder, "folder of training images")
    test_folder = next((root / name for name in TESTS if (root / name).is_dir()), None)
    if test_folder is None:
        raise ConfigError(
            f"{root} has neither a folder val nor a folder test; put the images that are to judge "
            f"the model into {root / TESTS[0]}/CLASS/"
        )
    classes = _classes(train_folder)
    if len(classes) == 1:
        raise ConfigError(
            f"{train_folder} has 1 class, {classes[0]!r}, and a model needs 2 or more to tell "
            f"apart; class folders are expected right in {train_folder}, and images right in "
            "them: see whether yours are one folder too deep, or too shallow"
        )
    test_classes = _classes(test_folder)
    _require_known(test_classes, classes, test_folder, train_folder)
    train, skipped = _read_folder(train_folder, classes, classes)
    test, more_skipped = _read_folder(test_folder, test_classes, classes)
    skipped += more_skipped
    if strict and skipped:
        raise ConfigError(
            f"{len(skipped)} files are no images: {_some(skipped)}. Remove or replace them, or "
            "set strict to false to go on without them"
        )
    return ImageSplit(train, test, tuple(skipped))


def _classes(folder: Path) -> tuple[str, ...]:
    found = sorted(
        path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    if not found:
        raise ConfigError(
            f"{folder} has no class folders; give each class a folder of its own there, such as "
            f"{folder / 'cat'}"
        )
    return tuple(found)


def _require_folder(folder: Path, what: str) -> None:
    if not folder.is_dir():
        raise ConfigError(
            f"the {what} {folder} does not exist; images are expected as {TRAIN}/CLASS/*.jpg and "
            f"{TESTS[0]}/CLASS/*.jpg"
        )


def _require_known(
    test_classes: Sequence[str], classes: Sequence[str], test_folder: Path, train_folder: Path
) -> None:
    unknown = sorted(set(test_classes) - set(classes))
    if unknown:
        raise ConfigError(
            f"{test_folder} has {len(unknown)} classes that {train_folder} lacks: "
            f"{_some(unknown)}. Give them images there too, or remove them"
        )


def _read_folder(
    folder: Path, names: Sequence[str], classes: tuple[str, ...]
) -> tuple[FolderImages, list[str]]:
    """Find the images of the classes `names`, and the files that are none."""
    library = pillow()
    kinds = _unreadable(library)

    def read_class(name: str) -> tuple[list[str], list[str]]:
        good: list[str] = []
        bad: list[str] = []
        for file in sorted((folder / name).iterdir()):
            if file.suffix.lower() in SUFFIXES and not file.name.startswith("."):
                (good if _is_image(library, file, kinds) else bad).append(f"{name}/{file.name}")
        return good, bad

    with ThreadPoolExecutor() as pool:  # a network's folders answer slowly, but many at once
        found = dict(zip(names, pool.map(read_class, names), strict=True))
    skipped = [str(folder / file) for _, bad in found.values() for file in bad]
    empty = [name for name, (good, _) in found.items() if not good]
    if empty:
        what = f"; {len(skipped)} files there are no images: {_some(skipped)}" if skipped else ""
        raise ConfigError(
            f"{len(empty)} classes of {folder} have no images ({', '.join(SUFFIXES)}): "
            f"{_some(empty)}{what}. Remove their folders, or give them images"
        )
    number = {name: place for place, name in enumerate(classes)}
    rows = [(file, number[name]) for name, (good, _) in found.items() for file in good]
    files, targets = zip(*rows, strict=True)
    return FolderImages(str(folder), classes, files, targets), skipped


def _is_image(library: Any, file: Path, kinds: tuple[type[Exception], ...]) -> bool:
    try:
        library.open(file).close()
    except kinds:
        return False
    return True


def _unreadable(library: Any) -> tuple[type[Exception], ...]:
    """Return what Pillow raises for files that are damaged, foreign or absurdly large."""
    return (OSError, SyntaxError, ValueError, EOFError, library.DecompressionBombError)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return ", ".join(listed[:MOST_NAMED]) + more
