"""What the sections of a recipe are made of."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Above0 = Annotated[float, Field(gt=0)]
From0 = Annotated[float, Field(ge=0)]


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _in_home(path: str) -> str:
    return str(Path(path).expanduser()) if path.startswith("~") else path


File = Annotated[str, AfterValidator(_in_home)]
"""A path, of a file or a folder; "~" is the user's home."""
Words = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]


def one_of(words: list[str]) -> Callable[[str], str]:
    """Make a check that a word is one of these."""

    def check(word: str) -> str:
        if word not in words:
            raise ValueError("must be " + " or ".join(f'"{known}"' for known in words))
        return word

    return check


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no silent conversions."""

    split_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of data that decide what is held out of them."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
