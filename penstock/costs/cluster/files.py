"""Read and write clusters as TOML, and find presets by name; files have two short forms:

[devices.v100]
preset = "v100-sxm2"                 the preset's fields; later ones replace them
memory_bytes = 34_359_738_368

[[hosts]]
devices = { v100 = 8 }               a list with "v100" eight times
"""

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, UnreadableError
from penstock.plain_values import from_plain

from .checks import MOST_DEVICES
from .hosts import Device

_FOLDER = files("penstock.costs") / "presets"
_ENDING = ".toml"


def preset_names(folder: str) -> tuple[str, ...]:
    """Return the names of presets in the folder "devices" or "clusters"."""
    names = [entry.name for entry in (_FOLDER / folder).iterdir()]
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


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Put the file's name before errors about its content."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{path}: {error}") from None


def cluster_text(path_or_preset: str | Path) -> str:
    """Return the TOML of a file or a preset; the preset of a device gives a host of one."""
    presets, devices = preset_names("clusters"), preset_names("devices")
    if path_or_preset in presets:
        return preset_text("clusters", str(path_or_preset))
    if path_or_preset in devices:  # its preset does not say how several would be linked
        name = path_or_preset
        return (
            f'name = "a host of one {name}"\n[devices.{name}]\npreset = "{name}"\n'
            f'[[hosts]]\nname = "host"\ndevices = {{ {name} = 1 }}\n'
        )
    return file_text(
        path_or_preset,
        f"no such preset; presets are {', '.join(presets)}; devices, each a host of one, are "
        f"{', '.join(devices)}",
    )


def file_text(path: str | Path, nor: str) -> str:
    """Return the text of a file; the UnreadableError for a missing one ends with `nor`."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UnreadableError(f"no such file, and {nor}") from None
    except OSError as error:
        raise UnreadableError(f"it cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UnreadableError("it is damaged, or no TOML: it is not UTF-8 text") from None


def parsed(text: str) -> dict[str, Any]:
    """Return the table of a TOML text; an UnreadableError if it is none."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"it is damaged, or no TOML: {error}") from None


def read_text(text: str) -> dict[str, Any]:
    """Return the plain data of a TOML text, with its short forms written out; an error if it is no
    TOML, names an unknown preset, or a device has impossible figures.
    """
    data = parsed(text)
    if isinstance(data.get("devices"), dict):
        data["devices"] = {key: _device(key, x) for key, x in data["devices"].items()}
    if isinstance(data.get("hosts"), list):
        data["hosts"] = [_host(f"hosts[{n}]", host) for n, host in enumerate(data["hosts"])]
    data.setdefault("links", {})
    return data


def write_text(cluster: Any, comment: str) -> str:
    """Return the TOML text of a cluster, which reads back as the same cluster."""
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


def _device(key: str, data: Any) -> Any:
    """Complete a device with the fields of its preset, and check it."""
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
    """Return a table with the entries of another put over it, also in inner tables."""
    both = {**under, **over}
    for name in under.keys() & over.keys():
        if isinstance(under[name], dict) and isinstance(over[name], dict):
            both[name] = {**under[name], **over[name]}
    return both


def _host(where: str, host: Any) -> Any:
    """Return a host with the kind of each of its devices."""
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
    """Return plain data without fields that have their default."""
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
