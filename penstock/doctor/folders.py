"""Can files be written where a run writes them, and is there room?"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from penstock.trace.units import bytes_text

from .finding import Finding, error, warning

LITTLE_BYTES = 2**30
"""Less free space than this is worth a warning."""


def check_folders(runs: Path, temporary: Path) -> Iterator[Finding]:
    """Look at the folder of the runs, which need not exist yet, and at that of temporary files."""
    yield from check_folder(temporary, "temporary files", "Set TMPDIR to another folder")
    yield from check_folder(
        runs, "runs and checkpoints", "Start in another folder, or use --run-folder"
    )


def check_folder(folder: Path, purpose: str, change: str) -> Iterator[Finding]:
    """Write a file and remove it again, in `folder` or the nearest one above that exists."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    what = f"the folder for {purpose}, {place}"
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"penstock")
    except OSError as failure:
        yield error(what, f"nothing can be written there ({failure.strerror})", change)
        return
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < LITTLE_BYTES:
        yield warning(
            what,
            f"{bytes_text(free_bytes)} are free, which the first checkpoints may fill",
            f"Make room, or: {change[0].lower()}{change[1:]}",
        )
