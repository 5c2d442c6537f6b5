"""Pages that are written into files: ours may be renewed, other files are left alone."""

from contextlib import suppress
from pathlib import Path

from penstock.errors import RunFolderError

from .render import SIGNATURE

_HEAD_CHARACTERS = 500
"""Of a page, in which its signature stands."""


def check_replaceable(output: Path) -> None:
    """See that there is no file at `output`, or a page of ours.

    Raises:
        RunFolderError: there is something else.
    """
    if not output.exists():
        return
    with suppress(OSError), output.open(encoding="utf-8", errors="replace") as file:
        if SIGNATURE in file.read(_HEAD_CHARACTERS):
            return
    raise RunFolderError(
        f"{output} exists already and is no report; choose another name, or move it away"
    )
