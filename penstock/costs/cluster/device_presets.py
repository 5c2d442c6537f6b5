"""Devices that Penstock describes, by name."""

import tomllib
from pathlib import Path

from penstock.errors import ConfigError, UnreadableError
from penstock.plain_values import from_plain

from .cluster import Cluster
from .device import Device
from .presets import preset_names, preset_text

_FOLDER = "devices"


def device_preset_names() -> tuple[str, ...]:
    """Return the names of all devices that are described."""
    return preset_names(_FOLDER)


def device_preset(name: str) -> Device:
    """Return the device of a name; its file says where each figure comes from.

    Raises:
        ConfigError: there is none of this name; lists those that there are.
    """
    known = device_preset_names()
    if name not in known:
        raise ConfigError(
            f"no device is called {name!r}; described are {', '.join(known)}. Choose one of "
            "these, or give a Device with the figures of yours"
        )
    device: Device = from_plain(Device, tomllib.loads(preset_text(_FOLDER, name)))
    return device


def load_device(name_or_path: str | Path) -> Device:
    """Return a device by its name, or else from a TOML file: its fields, or a cluster that has
    one kind of device.

    Raises:
        UnreadableError, ConfigError: there is neither, or the file does not hold a device; names
            it, and the place in it.
    """
    if name_or_path in device_preset_names():
        return device_preset(str(name_or_path))
    try:
        return _read(Path(name_or_path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(device_preset_names())
        raise UnreadableError(
            f"{name_or_path}: no such file, and no device of this name; described are {known}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{name_or_path}: it cannot be read: {error}") from None
    except ConfigError as error:
        raise type(error)(f"{name_or_path}: {error}") from None


def _read(text: str) -> Device:
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"it is damaged, or no TOML: {error}") from None
    if "devices" in data:
        return _only(Cluster.from_toml(text))
    device: Device = from_plain(Device, data)
    return device


def _only(cluster: Cluster) -> Device:
    if len(cluster.devices) > 1:
        raise ConfigError(
            f"devices has {', '.join(cluster.devices)}, and one is wanted; give a file with the "
            "fields of that one"
        )
    return next(iter(cluster.devices.values()))
