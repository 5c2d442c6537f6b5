"""Images in folders as ImageNet is unpacked: root/train/CLASS/*.jpg and root/val/CLASS/*.jpg."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import ConfigError

from .views import pillow

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")
"""The suffixes of image files."""
TRAIN = "train"
"""The folder of the training images."""
TESTS = ("val", "test")
"""The folders of the test images; the first that exists is used."""
MOST_NAMED = 5
"""Most names in an error message."""


@dataclass(frozen=True, slots=True)
class FolderImages:
    """Images in files: `files[n]`, below `folder`, has class number `targets[n]`.

    The object can be sent to worker processes.
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
        """Decode an image as RGB, ignoring its EXIF orientation; None if it is damaged.

        16-bit grey is scaled to 8 bits.  Other modes of more than 8 bits do not define black and
        white, so such an image counts as damaged.

        Raises:
            OSError: the file is gone, or its disk or network fails.  A passing failure must not
                change the training set.
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
        """Return a digest of the names, order and classes; the files' content does not count."""
        return blake2b(repr((self.classes, self.files, self.targets)).encode()).digest()


@dataclass(frozen=True, slots=True)
class ImageSplit:
    """Training and test images with the same classes.

    `skipped` has the paths of files that are no images.
    """

    train: FolderImages
    test: FolderImages
    skipped: tuple[str, ...] = ()


def read_image(path: str | Path, mode: str = "RGB") -> Any:
    """Decode an image file in one of Pillow's modes, "RGB" or "L" (grey).

    Raises:
        ConfigError: it is not there, or no image.
    """
    library = pillow()
    try:
        with library.open(path) as image:
            decoded = _as_rgb(library, image)
    except _unreadable(library) as error:
        raise ConfigError(f"cannot read the image {path}: {error}") from None
    if decoded is None:
        raise ConfigError(f"cannot read the image {path}: its mode has no black and white")
    return decoded.convert(mode)


def _as_rgb(library: Any, image: Any) -> Any:
    """Convert to 8-bit RGB; Pillow itself clips values of more than 8 bits to white."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        image.load()  # NumPy would hide the errors of this call
        values = np.asarray(image).astype(np.uint32)
        image = library.fromarray(((values + 128) // 257).astype(np.uint8))
    elif image.mode in ("I", "F"):
        return None
    return image.convert("RGB")


def image_folders(root: str | Path, *, strict: bool = False) -> ImageSplit:
    """Read root/train and root/val, or root/test if there is no val.

    Each has one folder per class, with .jpg, .jpeg, .png or .webp files directly in it.  Other
    files, and names that start with a dot, are ignored.  Classes are numbered in the order of
    their names in train; val may lack some of them.

    The head of each file is read here, about 10,000 files a second.  A file that is no image is
    skipped and listed in the result; later damage is found when the file is decoded.

    Args:
        root: the folder that holds train, and val or test.
        strict: refuse files that are no images.

    Raises:
        ConfigError: a folder is missing; there is one class only, or a class has no images; val
            has a class that train lacks; a file is no image, with `strict`.
    """
    # Find the folders and their classes.
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
    if unknown := sorted(set(test_classes) - set(classes)):
        raise ConfigError(
            f"{test_folder} has {len(unknown)} classes that {train_folder} lacks: "
            f"{_some(unknown)}. Give them images there too, or remove them"
        )
    # Read the heads of all files.
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
    names = sorted(
        path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    if not names:
        raise ConfigError(
            f"{folder} has no class folders; give each class a folder of its own there, such as "
            f"{folder / 'cat'}"
        )
    return tuple(names)


def _require_folder(folder: Path, what: str) -> None:
    if not folder.is_dir():
        raise ConfigError(
            f"the {what} {folder} does not exist; images are expected as {TRAIN}/CLASS/*.jpg and "
            f"{TESTS[0]}/CLASS/*.jpg"
        )


def _read_folder(
    folder: Path, names: Sequence[str], classes: tuple[str, ...]
) -> tuple[FolderImages, list[str]]:
    """Return the images of the classes `names`, and the paths of files that are no images."""
    library = pillow()
    kinds = _unreadable(library)

    def is_image(file: Path) -> bool:
        try:
            library.open(file).close()
        except kinds:
            return False
        return True

    def read_class(name: str) -> tuple[list[str], list[str]]:
        good: list[str] = []
        bad: list[str] = []
        for file in sorted((folder / name).iterdir()):
            if file.suffix.lower() in SUFFIXES and not file.name.startswith("."):
                (good if is_image(file) else bad).append(f"{name}/{file.name}")
        return good, bad

    with ThreadPoolExecutor() as pool:  # network file systems are slow, but serve many at once
        files_of = dict(zip(names, pool.map(read_class, names), strict=True))
    # Every class needs an image.
    skipped = [str(folder / file) for _, bad in files_of.values() for file in bad]
    empty = [name for name, (good, _) in files_of.items() if not good]
    if empty:
        what = f"; {len(skipped)} files there are no images: {_some(skipped)}" if skipped else ""
        raise ConfigError(
            f"{len(empty)} classes of {folder} have no images ({', '.join(SUFFIXES)}): "
            f"{_some(empty)}{what}. Remove their folders, or give them images"
        )
    # Number the classes by their order in train.
    number = {name: place for place, name in enumerate(classes)}
    rows = [(file, number[name]) for name, (good, _) in files_of.items() for file in good]
    files, targets = zip(*rows, strict=True)
    return FolderImages(str(folder), classes, files, targets), skipped


def _unreadable(library: Any) -> tuple[type[Exception], ...]:
    """Return the exceptions of Pillow for files that are damaged, foreign or absurdly large."""
    return (OSError, SyntaxError, ValueError, EOFError, library.DecompressionBombError)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return ", ".join(listed[:MOST_NAMED]) + more
