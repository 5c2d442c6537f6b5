"""CIFAR-10 and CIFAR-100, from the files that their authors give out: binary or Python's.

Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html: 60,000 colour images of 32 x 32
pixels.
"""

import io
import pickle
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError

from .source import ImageSplit, pillow

SIDE = 32
PIXELS = 3 * SIDE * SIDE


@dataclass(frozen=True, slots=True)
class _Variant:
    """How one of the two data sets is laid out in its two kinds of files.

    In a binary record `num_labels` bytes stand before the pixels, the last of them the class.
    """

    num_classes: int
    num_labels: int
    binary: str
    python: str
    train: tuple[str, ...]
    test: str
    labels: bytes
    names: tuple[str, bytes]
    binary_names: str


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_VARIANTS = {
    "cifar10": _Variant(
        num_classes=10,
        num_labels=1,
        binary="cifar-10-batches-bin",
        python="cifar-10-batches-py",
        train=_BATCHES,
        test="test_batch",
        labels=b"labels",
        names=("batches.meta", b"label_names"),
        binary_names="batches.meta.txt",
    ),
    "cifar100": _Variant(
        num_classes=100,
        num_labels=2,
        binary="cifar-100-binary",
        python="cifar-100-python",
        train=("train",),
        test="test",
        labels=b"fine_labels",
        names=("meta", b"fine_label_names"),
        binary_names="fine_label_names.txt",
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class ArrayImages:
    """Images in memory: `pixels` is uint8, (N, 3, 32, 32); `labels` is int64, (N,)."""

    title: str
    classes: tuple[str, ...]
    pixels: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def target(self, index: int) -> int:
        """Return the class of an image."""
        return int(self.labels[index])

    def name(self, index: int) -> str:
        """Return the data set's name and the image's number."""
        return f"{self.title}[{index}]"

    def read(self, index: int) -> Any:
        """Return an image; one in memory can always be read."""
        return pillow().fromarray(self.pixels[index].transpose(1, 2, 0))

    def digest(self) -> bytes:
        """Tell by what is in them."""
        found = blake2b(repr(self.classes).encode())
        found.update(self.labels.tobytes())
        found.update(self.pixels.tobytes())
        return found.digest()


def load_cifar(root: str | Path, name: str = "cifar10") -> ImageSplit:
    """Read CIFAR-10 or CIFAR-100 (its 100 fine classes) from the user's copy.

    Args:
        root: the unpacked folder (cifar-10-batches-bin, cifar-10-batches-py, cifar-100-binary or
            cifar-100-python), or the folder that holds it.  Where both kinds are, the binary one
            is read.
        name: "cifar10" or "cifar100".

    Raises:
        ConfigError: the name is not known; the files are missing, cut short or damaged, or hold
            what is neither numbers nor text.  Nothing in a file is run.
    """
    if name not in _VARIANTS:
        raise ConfigError(f"name={name!r} is not known; choose one of 'cifar10', 'cifar100'")
    variant = _VARIANTS[name]
    folder = _find(Path(root), variant)
    is_binary = folder.name == variant.binary
    read = _read_binary if is_binary else _read_python
    classes = _binary_names(folder, variant) if is_binary else _python_names(folder, variant)
    if len(classes) != variant.num_classes:
        raise ConfigError(
            f"{folder} names {len(classes)} classes, and {name} has {variant.num_classes}; unpack "
            "the archive anew"
        )

    def images(title: str, files: tuple[str, ...]) -> ArrayImages:
        parts = [read(folder / file, variant) for file in files]
        pixels = np.concatenate([pixels for pixels, _ in parts]).reshape(-1, 3, SIDE, SIDE)
        labels = np.concatenate([labels for _, labels in parts]).astype(np.int64)
        return ArrayImages(f"{folder}, {title}", classes, pixels, labels)

    suffix = ".bin" if is_binary else ""
    train = tuple(f"{file}{suffix}" for file in variant.train)
    return ImageSplit(images("train", train), images("test", (f"{variant.test}{suffix}",)))


def _find(root: Path, variant: _Variant) -> Path:
    for known in (variant.binary, variant.python):
        for folder in (root, root / known):
            if folder.name == known and folder.is_dir():
                return folder
    raise ConfigError(
        f"{root} holds neither {variant.binary} nor {variant.python}; give the folder that the "
        "archive from https://www.cs.toronto.edu/~kriz/cifar.html was unpacked in"
    )


Records = tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]
"""Pixels, (N, 3072), and labels, (N,)."""


def _read_binary(file: Path, variant: _Variant) -> Records:
    data = np.frombuffer(_bytes(file), np.uint8)
    length = variant.num_labels + PIXELS
    if not len(data) or len(data) % length:
        raise ConfigError(
            f"{file} has {len(data):,} bytes, no multiple of the {length:,} of one image: it is "
            "cut short or something else; unpack the archive anew"
        )
    records = data.reshape(-1, length)
    return _checked(
        file, records[:, variant.num_labels :], records[:, variant.num_labels - 1], variant
    )


def _read_python(file: Path, variant: _Variant) -> Records:
    content = _unpickled(file)
    pixels: Any = content.get(b"data")
    labels: Any = content.get(variant.labels)
    if not _is_batch(pixels, labels):
        raise ConfigError(
            f"{file} does not hold one class and {PIXELS:,} bytes for each image, under "
            f"{variant.labels!r} and b'data'; unpack the archive anew"
        )
    return _checked(file, pixels, np.array(labels), variant)


def _is_batch(pixels: Any, labels: Any) -> bool:
    return (
        isinstance(pixels, np.ndarray)
        and isinstance(labels, list)
        and len(labels) > 0
        and all(type(label) is int for label in labels)
        and pixels.dtype == np.uint8
        and pixels.shape == (len(labels), PIXELS)
    )


def _checked(
    file: Path, pixels: npt.NDArray[np.uint8], labels: npt.NDArray[Any], variant: _Variant
) -> Records:
    if labels.min() < 0 or labels.max() >= variant.num_classes:
        raise ConfigError(
            f"{file} has class {labels.max()}, and classes go from 0 to "
            f"{variant.num_classes - 1}: it is damaged or something else; unpack the archive anew"
        )
    return pixels, labels


def _binary_names(folder: Path, variant: _Variant) -> tuple[str, ...]:
    return tuple(_bytes(folder / variant.binary_names).decode().split())


def _python_names(folder: Path, variant: _Variant) -> tuple[str, ...]:
    file, key = variant.names
    names = _unpickled(folder / file).get(key)
    if not isinstance(names, list) or not all(isinstance(name, bytes) for name in names):
        raise ConfigError(f"{folder / file} has no names under {key!r}; unpack the archive anew")
    return tuple(name.decode() for name in names)


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}); unpack the whole archive"
        ) from None


class _PlainUnpickler(pickle.Unpickler):
    """Reads containers, text, numbers and arrays; a pickle may name any function, and run it."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what arrays are made with, under its names before and after NumPy 2."""
        reconstruct = np.empty(0).__reduce__()[0]
        known = {
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("numpy.core.multiarray", "_reconstruct"): reconstruct,
            ("numpy._core.multiarray", "_reconstruct"): reconstruct,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which images do not need")
        return known[module, name]


def _unpickled(file: Path) -> dict[Any, Any]:
    data = _bytes(file)
    try:
        content = _PlainUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:
        raise ConfigError(f"{file} cannot be read: {error}; unpack the archive anew") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds a {type(content).__name__}, no batch of images")
    return content
