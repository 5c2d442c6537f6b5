"""Presets: devices and clusters in TOML files of the folder `presets`, by name."""

import tomllib
from importlib.resources import files

from penstock.errors import ConfigError
from penstock.plain_values import from_plain

from .device import Device

_FOLDER = files("penstock.costs") / "presets"
_ENDING = ".toml"


def preset_names(folder: str) -> tuple[str, ...]:
    """Return the names of presets in the folder "devices" or "clusters"."""
    there = _FOLDER / folder
    names = [entry.name for entry in there.iterdir()] if there.is_dir() else []
    return tuple(sorted(x.removesuffix(_ENDING) for x in names if x.endswith(_ENDING)))


def preset_text(folder: str, name: str) -> str:
    """Return the text of a preset's file."""
    return (_FOLDER / folder / f"{name}{_ENDING}").read_text(encoding="utf-8")


def device_preset(name: str) -> Device:
    """Return a preset's device; its file names the source of each figure."""
    known = preset_names("devices")
    if name not in known:
        raise ConfigError(
            f"no device is called {name!r}; described are {', '.join(known)}. Choose one of "
            "these, or give a Device with the figures of yours"
        )
    device: Device = from_plain(Device, tomllib.loads(preset_text("devices", name)))
    return device


def preset_of(name: str, num_bytes: int) -> Device | None:
    """Return the preset of a card that calls itself so, of those with this chip the one that has
    about as much memory; None if there is none.
    """
    words = name.lower().replace("-", " ").split()
    every = map(device_preset, preset_names("devices"))
    alike = [own for own in every if _chip(own.name) in words]
    return min(alike, key=lambda own: abs(own.memory_bytes - num_bytes), default=None)


def _chip(name: str) -> str:
    """Return the part of a preset's name that names the chip: the first with a digit."""
    return next(part for part in name.split("-") if any(map(str.isdigit, part)))
