"""The samples that a recipe may name: `[data]`."""

from typing import Annotated, Literal

from pydantic import Field

from .section import Section, Seed


class Digits(Section):
    """The 1,797 handwritten digits that ship with scikit-learn."""

    name: Literal["digits"]
    """digits: 1,797 handwritten digits, which ship with scikit-learn."""
    labels: Literal["digit", "parity", "half"] = "digit"
    """What is to be told of a picture: its digit; whether that is odd; whether it is 5 or more."""
    size: Annotated[int, Field(ge=8, le=64)] = 8
    """Pixels of each side; the originals have 8, and are enlarged."""
    train_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the training samples that is used, to see what few samples teach."""
    test_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of each digit's pictures that is set aside for testing."""
    max_shift: Annotated[int, Field(ge=0, le=8)] = 1
    """Training pictures move by up to so many pixels, anew in every epoch."""
    seed: Seed = 0
    """Decides the split into training and test samples."""


DataSection = Digits
