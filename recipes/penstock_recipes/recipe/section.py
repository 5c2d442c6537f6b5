"""What the sections of a recipe are made of."""

from collections.abc import Callable, Iterator
from enum import Enum, auto
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo


class Mark(Enum):
    """What is to be known of a key beside its default and its bounds; part of its annotation.

    Keys of the first three decide how and not what a run computes: they may change on resume, and
    no bit of the result does, but that another num_replicas or threads_per_stage may round
    differently.
    """

    EXECUTION = auto()
    """How a run is executed and kept."""
    LAYOUT = auto()
    """Which process runs which stages."""
    PROCESSES = auto()
    """How many processes there are."""
    HELD_OUT = auto()
    """Which data are held out of those to learn from."""


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

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    def options(self) -> dict[str, Any]:
        """Return all keys but the name, as arguments for what the name stands for."""
        return self.model_dump(exclude={"name"})

    @classmethod
    def marked(cls, *marks: Mark) -> Iterator[str]:
        """Yield the keys that have one of these marks."""
        for key, field in cls.model_fields.items():
            if not set(marks).isdisjoint(mark for mark in field.metadata if type(mark) is Mark):
                yield key


def variants(field: FieldInfo) -> list[type[Section]]:
    """List what a section may be: one for each name that it may have, where it has a name."""
    kinds = get_args(field.annotation) or (field.annotation,)
    return [kind for kind in kinds if issubclass(kind, Section)]
