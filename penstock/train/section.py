"""What the sections of a recipe are made of."""

from collections.abc import Callable
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Above0 = Annotated[float, Field(gt=0)]
From0 = Annotated[float, Field(ge=0)]


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


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

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
