"""Hardware that Penstock describes: TOML files beside this one, found by their names."""

from importlib.resources import files
from importlib.resources.abc import Traversable

_ENDING = ".toml"


def preset_names(folder: str) -> tuple[str, ...]:
    """Return what can be taken by name of "devices" or "clusters"."""
    there = _folder(folder)
    if not there.is_dir():
        return ()
    names = (entry.name for entry in there.iterdir())
    return tuple(sorted(x.removesuffix(_ENDING) for x in names if x.endswith(_ENDING)))


def preset_text(folder: str, name: str) -> str:
    """Return the file of a name that `preset_names` has."""
    return (_folder(folder) / f"{name}{_ENDING}").read_text(encoding="utf-8")


def _folder(name: str) -> Traversable:
    return files("penstock.costs") / "presets" / name
