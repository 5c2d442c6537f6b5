"""A checkpoint as a folder of files that appears whole or not at all.

    model.safetensors       parameters and buffers, under the model's own names
    optimizer.safetensors   the optimizer's tensors, under "<parameter name>.<state key>"
    state.json              format, digests of the other files, and everything that is no tensor

Many processes write folders model/ and optimizer/ of such files instead, a shard each, so that no
file has two writers: at most 2 K + 1 files for K processes.  state.json names the tensors of each
file and the slices among them, so that a reader opens only files that it needs (pieces.py).  The
folder is written under a hidden name beside its place, forced to the disk, and renamed.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from penstock.errors import CheckpointError

from .complex_pairs import save_tensors

FORMAT = "penstock-checkpoint"
VERSION = 2
"""Version 1 has no slices."""
STATE = "state.json"
SUFFIX = ".safetensors"
MODEL = f"model{SUFFIX}"
OPTIMIZER = f"optimizer{SUFFIX}"
EXTRA = "extra_state"
"""Where facts, or the metadata of a file, hold extra state of modules that is no tensor."""
UNFINISHED = ".unfinished"
"""How the name of a folder ends while it is being written or deleted."""
_MISSING = "it is missing"
_OTHER_DIGEST = "its digest is not the one noted when it was written"


def write_folder(
    path: Path, tensors: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]
) -> None:
    """Write `tensors[file][name]` and `facts` as the folder `path`, in one step for any reader.

    Raises:
        CheckpointError: `path` exists, `facts` holds what JSON cannot, or the disk is full or
            refuses; nothing is left behind.
    """
    refuse_existing(path)
    facts = jsonable(facts)
    try:
        _write_and_rename(path, tensors, facts)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the checkpoint {path}: {error}; nothing is left of it. "
            "Make room, or choose another place"
        ) from error


def refuse_existing(path: Path) -> None:
    """See that nothing is overwritten.

    Raises:
        CheckpointError: something is at `path`.
    """
    if path.exists():
        raise CheckpointError(
            f"{path} exists already and is never overwritten; choose another name"
        )


def _write_and_rename(
    path: Path, tensors: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]
) -> None:
    with unfinished_folder(path) as unfinished:
        for name, content in tensors.items():
            save_tensors(content, unfinished / name)
        finish_folder(unfinished, path, facts, {})


@contextmanager
def unfinished_folder(path: Path) -> Iterator[Path]:
    """Make a folder with a hidden name beside `path`; it is deleted if anything goes wrong."""
    unfinished = make_unfinished(path)
    try:
        yield unfinished
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def make_unfinished(path: Path) -> Path:
    """Make a folder with a hidden name beside `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = tempfile.mkdtemp(prefix=f".{path.name}.", suffix=UNFINISHED, dir=path.parent)
    Path(made).chmod(0o755)  # mkdtemp makes it private; other processes may be other hosts'
    return Path(made)


def finish_folder(
    unfinished: Path, path: Path, facts: Mapping[str, Any], digests: Mapping[str, str]
) -> None:
    """Add state.json to a folder that holds all tensors, and give it its name.

    `digests` are those of files that their writers have forced to the disk.
    """
    facts = jsonable(facts)  # as it will be read, for its digest
    files = sorted(file for file in unfinished.rglob("*") if file.is_file())
    names = [file.relative_to(unfinished).as_posix() for file in files]
    found = {name: digests.get(name) or digest_and_force(unfinished / name) for name in names}
    check_all_seen(digests, found)
    digests = {**found, STATE: digest_of([facts, found])}
    state = {"format": FORMAT, "version": VERSION, "digests": digests, "facts": facts}
    (unfinished / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    force_to_disk(unfinished / STATE)
    put_in_place(unfinished, path)


def check_all_seen(written: Collection[str], seen: Collection[str]) -> None:
    """See that what other processes wrote is here too.

    Raises:
        CheckpointError: names what is not.
    """
    if missing := set(written) - set(seen):
        raise CheckpointError(
            f"{', '.join(sorted(missing))} was written by another process and is not seen here; "
            "put checkpoints where all hosts see them"
        )


def put_in_place(unfinished: Path, path: Path) -> None:
    """Rename a folder, all of whose files are on the disk, to its name."""
    folders = [folder for folder in unfinished.rglob("*") if folder.is_dir()]
    for place in (*folders, unfinished):
        force_to_disk(place)
    unfinished.rename(path)
    force_to_disk(path.parent)


def read_facts(path: Path) -> dict[str, Any]:
    """Read state.json, and prove by digest that the other files are as they were written.

    Raises:
        CheckpointError: not a checkpoint, of another version, incomplete or damaged.
    """
    facts, digests = read_state(path)
    check_files(path, digests)
    return facts


def read_state(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read state.json: what describes the checkpoint, and the digests of its other files.

    Raises:
        CheckpointError: not a checkpoint, of another version, or state.json is damaged.
    """
    state = _read_state(path)
    if state.get("version") not in range(1, VERSION + 1):
        raise CheckpointError(
            f"{path} has format version {state.get('version')}, this Penstock reads versions up "
            f"to {VERSION}; load it with the version that wrote it"
        )
    facts: dict[str, Any] = state.get("facts", {})
    digests: dict[str, str] = state.get("digests", {})
    own = digests.pop(STATE, None) if isinstance(digests, dict) else None
    if own != digest_of([facts, digests]):
        raise damaged(path, STATE, _OTHER_DIGEST)
    for name in (*digests, *(facts.get("files") or {}), *facts.get("slices", {})):
        check_inside(path, name, STATE, follows_links=False)
    return facts, digests


def check_inside(path: Path, name: str, says: str, *, follows_links: bool) -> None:
    """Refuse a file that the file `says` in the folder `path` names, and that lies elsewhere.

    With `follows_links`, links in the folder may lead out of it, as in caches of downloads.

    Raises:
        CheckpointError: it does.
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
    """Prove that files are as they were written.

    Raises:
        CheckpointError: one is missing or damaged.
    """
    for name, digest in digests.items():
        if not (path / name).is_file():
            raise damaged(path, name, _MISSING)
        if _digest(path / name) != digest:
            raise damaged(path, name, _OTHER_DIGEST)


def size_of(path: Path, name: str) -> int:
    """Return the bytes of a file.

    Raises:
        CheckpointError: it is missing.
    """
    try:
        return (path / name).stat().st_size
    except OSError:
        raise damaged(path, name, _MISSING) from None


def digest_of_checkpoint(path: Path) -> str:
    """Tell a checkpoint from others by what state.json notes of all its files.

    Raises:
        CheckpointError: it is none.
    """
    return digest_of(_read_state(path).get("digests", {}))


def _read_state(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}; give the folder of a checkpoint")
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} holds no {STATE}, so it is no Penstock checkpoint; give another folder"
        ) from None
    except (OSError, ValueError) as error:
        raise damaged(path, STATE, str(error)) from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path / STATE} was not written by Penstock; give another folder")
    return state


def remove_folder(path: Path) -> None:
    """Delete a checkpoint; it disappears whole, however the deletion ends."""
    doomed = path.with_name(f".{path.name}{UNFINISHED}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


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
    """Return the digest of what JSON can hold, whatever the order of keys."""
    return "sha256:" + hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()


def digest_and_force(file: Path) -> str:
    """Force a file to the disk; give its digest."""
    force_to_disk(file)
    return _digest(file)


def force_to_disk(path: Path) -> None:
    """See that a file or folder outlives the machine's failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
