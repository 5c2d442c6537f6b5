"""The base class, the types and the marks of the sections of a recipe."""

from collections.abc import Callable, Iterator
from enum import Enum, auto
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo


class Mark(Enum):
    """A property of a key, part of its annotation.

    Keys with one of the first three marks may change on resume without changing a bit of the
    result.  Exceptions: another num_replicas or threads_per_stage may round differently.
    """

    EXECUTION = auto()
    """The key sets the execution of a run, or its files."""
    LAYOUT = auto()
    """The key sets the process of each stage."""
    PROCESSES = auto()
    """The key sets the number of processes."""
    HELD_OUT = auto()
    """The key sets the split into training and held-out samples."""
    LENGTH = auto()
    """The key sets the length of a run; changed on resume, it decides what follows only."""


Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Above0 = Annotated[float, Field(gt=0)]
From0 = Annotated[float, Field(ge=0)]
File = Annotated[
    str, AfterValidator(lambda path: str(Path(path).expanduser()) if path[:1] == "~" else path)
]
"""A path of a file or a folder; "~" is the user's home."""
Words = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: tuple(value) if type(value) is list else value)
]
"""Strings; a TOML list becomes a tuple."""


def one_of(words: list[str]) -> Callable[[str], str]:
    """Return a validator that accepts these words only."""

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
        """Return all keys except the name, as keyword arguments."""
        return self.model_dump(exclude={"name"})

    @classmethod
    def marked(cls, *marks: Mark) -> Iterator[str]:
        """Yield the keys with one of these marks."""
        for key, field in cls.model_fields.items():
            if not set(marks).isdisjoint(mark for mark in field.metadata if type(mark) is Mark):
                yield key


def variants(field: FieldInfo) -> list[type[Section]]:
    """Return the classes of a section: one for each name that it may have."""
    kinds = get_args(field.annotation) or (field.annotation,)
    return [kind for kind in kinds if issubclass(kind, Section)]
