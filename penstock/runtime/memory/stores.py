"""Store offloaded activations in files, or in the host's memory."""

import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from ctypes import c_char
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from penstock.errors import ConfigError, check_kind
from penstock.model.copies import CACHE_LINE_BYTES
from penstock.runtime.devices import StageDevice

_WIDEST_BYTES = 16
"""Bytes of the widest element type, complex128."""


class AbstractStore(ABC):
    """Holds copies of storages outside the device's memory, for one stage during a run."""

    @abstractmethod
    def put(self, storage: UntypedStorage) -> Any:
        """Copy a storage; return the key of the copy.  OSError: there is no room."""

    @abstractmethod
    def get(self, place: Any) -> tuple[UntypedStorage, int]:
        """Return a new storage with a lead and then the same bytes, and the lead in bytes.

        Free the copy; OSError if it cannot be read.
        """


class FileStore(AbstractStore):
    """Stores copies in a file without a name in `folder`; the system deletes it with the process.

    A copy reuses the place of a freed one of the same size.

        before   │....xxxxxxxx│      lead of 4 bytes in its cache line
        after    │....xxxxxxxx│      the same lead: the order in which matrix kernels add
                                     depends on it
    """

    def __init__(self, folder: str | None, device: StageDevice | None = None) -> None:
        self._folder = folder
        self._free: dict[int, list[int]] = {}
        self._end = self._num_held = 0
        self._file: Any = None

    def put(self, storage: UntypedStorage) -> Any:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
            self._closing = weakref.finalize(self, self._file.close)
        size, lead = storage.nbytes(), storage.data_ptr() % CACHE_LINE_BYTES
        free = self._free.get(size)
        start = free.pop() if free else self._end
        if start == self._end:
            self._end += size
        self._file.seek(start)
        rest = _bytes_of(storage)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._num_held += 1
        return start, size, 0 if lead % _WIDEST_BYTES else lead

    def get(self, place: Any) -> tuple[UntypedStorage, int]:
        start, size, lead = place
        storage = UntypedStorage(lead + size)
        self._file.seek(start)
        rest = _bytes_of(storage)[lead:]
        while rest:
            count = self._file.readinto(rest)
            if not count:
                raise OSError(f"the file has lost {len(rest):,} bytes")
            rest = rest[count:]
        self._free.setdefault(size, []).append(start)
        self._num_held -= 1
        if not self._num_held:
            self._closing()
            self._file, self._end = None, 0
            self._free.clear()
        return storage, lead


class HostStore(AbstractStore):
    """Stores copies in the host's pinned memory; they overlap with the stage's kernels."""

    def __init__(self, device: StageDevice) -> None:
        self._device = device

    def put(self, storage: UntypedStorage) -> Any:
        # The copy stream reads `here` later: the allocator must not reuse it before.
        here = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        there = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        with self._device.copying() as stream:
            there.copy_(here, non_blocking=True)
        here.record_stream(stream)
        return there

    def get(self, place: Tensor) -> tuple[UntypedStorage, int]:
        with self._device.copying():
            here = place.to(self._device.device, non_blocking=True)
        here.record_stream(torch.cuda.current_stream(self._device.device))
        return here.untyped_storage(), 0


MakeStore = Callable[[StageDevice], AbstractStore]
"""A function that makes a store for one run of the stage on a device."""


def folder_for_files(folder: Any) -> str | None:
    """Return `folder` as a string (None stays None); ConfigError unless it can hold files."""
    if folder is None:
        return None
    check_kind("offload_folder", folder, (str, os.PathLike), "the path of a folder")
    path: str = os.fspath(folder)
    _check_holds_files(path)
    return path


def _check_holds_files(folder: str | None) -> None:
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"offload_folder={folder!r} cannot hold what stages move there: {error.strerror}; "
            "give the path of a folder that is there and may be written to"
        ) from None


def store_on(device: torch.device, folder: str | None) -> MakeStore:
    """Return the maker of a stage's stores; ConfigError if `folder` cannot hold a CPU's files."""
    if device.type == "cuda":
        return HostStore
    _check_holds_files(folder)
    return partial(FileStore, folder)


def _bytes_of(storage: UntypedStorage) -> memoryview:
    size = storage.nbytes()
    return memoryview((c_char * size).from_address(storage.data_ptr() if size else 0)).cast("B")
