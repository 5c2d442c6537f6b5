"""A checkpoint as a folder of files that appears whole or not at all.

    model.safetensors       parameters and buffers, under the model's own names
    optimizer.safetensors   the optimizer's tensors, under "<parameter name>.<state key>"
    state.json              format, digests of the other files, and everything that is no tensor

Many processes write folders model/ and optimizer/ of such files instead, a shard each, so that no
file has two writers: at most 2 K + 1 files for K processes.  state.json names the tensors of each
file and the slices among them, so that a reader opens only files that it needs (reader.py).  The
folder is written under a hidden name beside its place, forced to the disk, and renamed.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Set
from pathlib import Path, PurePath
from typing import Any

from penstock.errors import CheckpointError

FORMAT = "penstock-checkpoint"
VERSION = 2
"""Version 1 has no slices."""
STATE = "state.json"
SUFFIX = ".safetensors"
MODEL = f"model{SUFFIX}"
OPTIMIZER = f"optimizer{SUFFIX}"
EXTRA = "extra_state"
"""The key of modules' extra state that is no tensor, in state.json or a file's metadata."""
UNFINISHED = ".unfinished"
"""The end of a folder's name while it is being written or deleted."""
_MISSING = "it is missing"
_OTHER_DIGEST = "its digest is not the one noted when it was written"


def refuse_existing(path: Path, *, allows_empty: bool = False) -> None:
    """Raise a CheckpointError if `path` exists; with `allows_empty` it may be an empty folder."""
    if path.exists() and not (allows_empty and path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(
            f"{path} exists already and is never overwritten; choose another name"
            + (", or an empty folder" if allows_empty else "")
        )


def write_state(facts: Mapping[str, Any], folder: Path, digests: Mapping[str, str]) -> None:
    """Add state.json to a folder that holds all tensors, in files of these digests."""
    facts = jsonable(facts)  # as it will be read, for its digest
    noted = {**digests, STATE: digest_of([facts, digests])}
    state = {"format": FORMAT, "version": VERSION, "digests": noted, "facts": facts}
    (folder / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def put_in_place(unfinished: Path, path: Path, written: Set[str]) -> None:
    """Rename a folder once all of it is on the disk; its files `written` are there already.  One
    that another process has written and cannot be seen here is a CheckpointError.
    """
    there = {place.relative_to(unfinished).as_posix(): place for place in unfinished.rglob("*")}
    if missing := written - there.keys():
        raise CheckpointError(
            f"{', '.join(sorted(missing))} was written by another process and is not seen here; "
            "put checkpoints where all hosts see them"
        )
    for name in there.keys() - written:
        force_to_disk(there[name])
    force_to_disk(unfinished)
    unfinished.rename(path)
    force_to_disk(path.parent)


def read_state(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read state.json: the facts of the checkpoint, and the digests of its other files.

    Raises:
        CheckpointError: not a checkpoint, of another version, or state.json is damaged.
    """
    # 1. Read state.json, and check that this version can read it.
    if not path.is_dir():
        fault = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {fault}; give the folder of a checkpoint")
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} holds no {STATE}, so it is no Penstock checkpoint; give another folder"
        ) from None
    except (OSError, ValueError) as error:
        raise damaged(path, STATE, error) from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path / STATE} was not written by Penstock; give another folder")
    if state.get("version") not in range(1, VERSION + 1):
        raise CheckpointError(
            f"{path} has format version {state.get('version')}, this Penstock reads versions up "
            f"to {VERSION}; load it with the version that wrote it"
        )
    # 2. Compare the digest of what was read with the one that state.json has of itself.
    facts: dict[str, Any] = state.get("facts", {})
    digests: dict[str, str] = state.get("digests", {})
    noted_digest = digests.pop(STATE, None) if isinstance(digests, dict) else None
    if noted_digest != digest_of([facts, digests]):
        raise damaged(path, STATE, _OTHER_DIGEST)
    # 3. Refuse names that lead out of the folder.
    for name in (*digests, *(facts.get("files") or {}), *facts.get("slices", {})):
        check_inside(path, name, STATE, follows_links=False)
    return facts, digests


def check_inside(path: Path, name: str, says: str, *, follows_links: bool) -> None:
    """Raise a CheckpointError for a file name, in the file `says` of the folder `path`, that leads
    out of the folder.

    With `follows_links`, links in the folder may lead out of it, as in caches of downloads.
    """
    parts = PurePath(name)
    is_out = parts.is_absolute() or ".." in parts.parts
    if not (is_out or follows_links):
        is_out = not (path / name).resolve().is_relative_to(path.resolve())
    if is_out:
        raise CheckpointError(
            f"{path / says} names the file {name!r}, which is outside of the folder; it may name "
            "files of its own folder only. Do not use a folder whose origin you do not trust; "
            f"else put the file into it, and correct {says}"
        )


def check_files(path: Path, digests: Mapping[str, str]) -> None:
    """Raise a CheckpointError if a file is missing, or damaged by its digest."""
    for name, digest in digests.items():
        if not (path / name).is_file():
            raise damaged(path, name, _MISSING)
        if digest_of_file(path / name) != digest:
            raise damaged(path, name, _OTHER_DIGEST)


def damaged(path: Path, name: str, why: Exception | str) -> CheckpointError:
    """Say that a file of the checkpoint `path` cannot be read."""
    why = _MISSING if isinstance(why, FileNotFoundError) else why
    return CheckpointError(
        f"{path / name} is damaged: {why}; use another checkpoint, or copy this one anew"
    )


def jsonable(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts as they will be when read back: tuples are lists, all keys strings."""
    try:
        read: dict[str, Any] = json.loads(json.dumps(facts))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the state to save holds what JSON cannot ({error}); "
            "give numbers, strings, lists and dicts of them"
        ) from None
    return read


def digest_of(facts: Any) -> str:
    """Return the digest of a JSON value, whatever the order of its keys."""
    return "sha256:" + hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def digest_of_file(file: Path) -> str:
    with file.open("rb") as stream:
        return "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()


def force_to_disk(path: Path) -> None:
    """Force a file or folder to the disk, so that it outlives a failure of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint; it disappears whole, however the deletion ends."""
    path = Path(path)
    doomed = path.with_name(f".{path.name}{UNFINISHED}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def remove_unfinished(folder: str | os.PathLike[str]) -> None:
    """Delete the remains of interrupted saves in a folder; no save may be under way there."""
    for path in Path(folder).glob(f".*{UNFINISHED}"):
        remove_checkpoint(path)
