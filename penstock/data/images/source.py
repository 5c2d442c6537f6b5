"""Where images come from: what every source of them can be asked."""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from penstock.errors import ConfigError


class Images(Protocol):
    """Numbered images, each of one class; made so that it can be sent to worker processes."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; a target is a place in here."""

    def __len__(self) -> int:
        """Count the images."""

    def target(self, index: int) -> int:
        """Return the class of an image."""

    def name(self, index: int) -> str:
        """Return what a person can find the image by."""

    def read(self, index: int) -> Any:
        """Return an RGB image of Pillow's; None if it cannot be decoded."""

    def digest(self) -> bytes:
        """Tell these images, their order and their classes from others, wherever they are kept."""


@dataclass(frozen=True, slots=True)
class ImageSplit:
    """Images to learn from and images to be judged by, with the same classes.

    `skipped` names the files of both that are no images.
    """

    train: Images
    test: Images
    skipped: tuple[str, ...] = ()


def require_extra(*modules: str) -> None:
    """Refuse to go on without the libraries for images.

    Raises:
        ConfigError: says which is missing, and how to install it.
    """
    for module in modules:
        if find_spec(module) is None:
            raise ConfigError(
                f"images need {module}, which is not installed; "
                "install it with: pip install 'penstock[images]'"
            )


def pillow() -> Any:
    """Return Pillow's Image module.

    Raises:
        ConfigError: it is not installed.
    """
    require_extra("PIL")
    return import_module("PIL.Image")
