"""Clusters as TOML: what a file may say more shortly than the value it stands for.

[devices.v100]
preset = "v100-sxm2"                 the preset's fields; those that follow are in their place
memory_bytes = 34_359_738_368

[[hosts]]
devices = { v100 = 8 }               for a list of eight times "v100"
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import ConfigError, UnreadableError
from penstock.plain_values import from_plain

from .checks import MOST_DEVICES
from .device import Device
from .presets import preset_names, preset_text

_T = TypeVar("_T")


def read_file(path_or_preset: str | Path, read: Callable[[str], _T]) -> _T:
    """Read a file, or else the preset of this name; that of a device is a host of one.

    Raises:
        UnreadableError: there is neither, or what is there cannot be read; names the file.
        ConfigError: values do not fit together; names the file.
    """
    try:
        return read(_text(path_or_preset))
    except ConfigError as error:
        raise type(error)(f"{path_or_preset}: {error}") from None


def read_text(text: str) -> dict[str, Any]:
    """Return what a TOML text says, written out.

    Raises:
        UnreadableError: it is no TOML, or names a preset that is not there.
        ConfigError: a device has figures that none has.
    """
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"it is damaged, or no TOML: {error}") from None
    if isinstance(data.get("devices"), dict):
        data["devices"] = {key: _device(key, x) for key, x in data["devices"].items()}
    if isinstance(data.get("hosts"), list):
        data["hosts"] = [_host(f"hosts[{n}]", host) for n, host in enumerate(data["hosts"])]
    data.setdefault("links", {})
    return data


def write_text(cluster: Any, comment: str) -> str:
    """Write a cluster as TOML that is read back as the same."""
    import tomli_w  # not needed to read

    data = _short(cluster)
    for key, device in data["devices"].items():
        if device["name"] == key:
            del device["name"]
    for host in data["hosts"]:
        counts = [(kind, len(list(same))) for kind, same in groupby(host["devices"])]
        if len(dict(counts)) == len(counts):
            host["devices"] = dict(counts)
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    tables = {name: data.pop(name) for name in ("devices", "links", "hosts") if name in data}
    return "\n".join([*lines, tomli_w.dumps({**data, **tables})])


def _text(path_or_preset: str | Path) -> str:
    presets = preset_names("clusters")
    if path_or_preset in presets:
        return preset_text("clusters", str(path_or_preset))
    devices = preset_names("devices")
    if path_or_preset in devices:
        return _one_device(str(path_or_preset))
    try:
        return Path(path_or_preset).read_text(encoding="utf-8")
    except FileNotFoundError:
        known = f"{', '.join(presets)}; devices, each a host of one, are {', '.join(devices)}"
        raise UnreadableError(f"no such file, and no such preset; presets are {known}") from None
    except OSError as error:
        raise UnreadableError(f"it cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UnreadableError("it is damaged, or no TOML: it is not UTF-8 text") from None


def _one_device(name: str) -> str:
    """Return a host of one device: how several would be linked, its preset does not say."""
    return (
        f'name = "a host of one {name}"\n[devices.{name}]\npreset = "{name}"\n'
        f'[[hosts]]\nname = "host"\ndevices = {{ {name} = 1 }}\n'
    )


def _device(key: str, data: Any) -> Any:
    """Put a preset's fields where a device has none of its own, and see that it can be one."""
    where = f"devices.{key}"
    if not isinstance(data, dict):
        return data
    name = data.pop("preset", None)
    if name is not None:
        known = preset_names("devices")
        if name not in known:
            raise UnreadableError(
                f"{where}.preset is {name!r}, and there is none of this name; presets are "
                f"{', '.join(known)}"
            )
        data = _merged(tomllib.loads(preset_text("devices", name)), data)
    data.setdefault("name", key)
    try:
        from_plain(Device, data, where)
    except UnreadableError:
        raise
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return data


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Put a table over another; tables in them likewise."""
    both = {**under, **over}
    for name in under.keys() & over.keys():
        if isinstance(under[name], dict) and isinstance(over[name], dict):
            both[name] = {**under[name], **over[name]}
    return both


def _host(where: str, host: Any) -> Any:
    """Write out how many devices of each kind a host has.

    Raises:
        UnreadableError: it has a key that is read no more.
    """
    if isinstance(host, dict) and "process_bytes" in host:
        raise UnreadableError(
            f"{where}.process_bytes is read no more, as the memory of whole processes is not "
            "predicted; remove that line"
        )
    if not isinstance(host, dict) or not isinstance(host.get("devices"), dict):
        return host
    kinds: list[str] = []
    for kind, count in host["devices"].items():
        if type(count) is not int or not 1 <= count <= MOST_DEVICES:
            raise UnreadableError(
                f"{where}.devices.{kind} must be a whole number from 1 to {MOST_DEVICES}, and is "
                f"{count!r}"
            )
        kinds += [kind] * count
    return {**host, "devices": kinds}


def _short(value: Any) -> Any:
    """Return plain data without what is as usual."""
    if isinstance(value, Mapping):
        return {name: _short(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return [_short(part) for part in value]
    if not is_dataclass(value):
        return value
    parts = {}
    for field in fields(value):
        part = getattr(value, field.name)
        usual = field.default if field.default_factory is MISSING else field.default_factory()
        if part != usual:
            parts[field.name] = _short(part)
    return parts
