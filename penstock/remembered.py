"""What was found once is kept in the user's cache folder, so that it is not found again."""

import os
import tempfile
from pathlib import Path


def cache_file(room: str, name: str) -> Path | None:
    """Return where something of this name is kept: in the folder `PENSTOCK_CACHE`, by default
    ~/.cache/penstock.  None where nothing is to be kept, for "off", or there is no home.
    """
    own = os.environ.get("PENSTOCK_CACHE")
    if own == "off":
        return None
    home = own or os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(home) if home else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "penstock" / room / name


def keep(file: Path, content: bytes) -> None:
    """Write a file at once, so that nobody reads half of it; not, where that is not allowed."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as new:
            new.write(content)
        Path(new.name).replace(file)
    except OSError:  # costs the same work a second time, no more
        return
