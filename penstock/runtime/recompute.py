"""What a forward saw, so that a recompute sees the same: buffers, modes, weights and inputs.

Buffers and modes are put back for the recompute.  Weights and inputs are the caller's: if they
changed in between, there is nothing right to compute, and that is an error.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.errors import RecomputeError

BufferKey = tuple[nn.Module, str]


@dataclass(slots=True)
class Seen:
    """What one forward saw: changing buffers, training modes, versions of weights and inputs."""

    buffers: dict[BufferKey, Any]
    modes: list[bool]
    weight_versions: list[int]
    input_versions: list[int]


class Repeatable:
    """The layers of a stage, whose forward can be run again as it was."""

    def __init__(self, modules: tuple[nn.Module, ...], skip: tuple[nn.Module, ...]) -> None:
        self._buffers = _ChangingBuffers(modules, skip)
        self._modules = list(dict.fromkeys(m for root in modules for m in root.modules()))

    @contextmanager
    def remembered(self, inputs: Sequence[Tensor]) -> Iterator[Seen]:
        """Run a forward inside; the given value then says what it saw.

        Raises:
            RecomputeError: it changed a buffer that no earlier forward changed.
        """
        seen = Seen({}, self._modes(), self._weight_versions(), [t._version for t in inputs])
        with self._buffers.watched(seen):
            yield seen

    @contextmanager
    def restored(self, seen: Seen, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Run the forward again inside, in the modes and with the buffers it saw.

        Raises:
            RecomputeError: weights or inputs changed since.
        """
        if seen.weight_versions != self._weight_versions():
            raise _changed("a weight", "call optimizer.step() only after the backward")
        if seen.input_versions != [t._version for t in inputs]:
            raise _changed("an input", "leave the batch as it is until the backward has run")
        modes = self._modes()
        self._set_modes(modes, seen.modes)
        try:
            with self._buffers.restored(seen):
                yield
        finally:
            self._set_modes(seen.modes, modes)

    def _modes(self) -> list[bool]:
        return [module.training for module in self._modules]

    def _set_modes(self, now: list[bool], wanted: list[bool]) -> None:
        if now != wanted:
            for module, training in zip(self._modules, wanted, strict=True):
                module.training = training

    def _weight_versions(self) -> list[int]:
        return [p._version for m in self._modules for p in m._parameters.values() if p is not None]


def _changed(what: str, remedy: str) -> RecomputeError:
    return RecomputeError(
        f"{what} was changed in place between a forward and its recompute, so the activations "
        f"cannot be computed again as they were; {remedy}, or use recompute=Recompute.NEVER"
    )


class _ChangingBuffers:
    """Finds out which buffers of a stage its forward changes, and keeps what each forward saw.

    The first forward keeps a copy of every buffer; from then on only those seen to change in
    place. A buffer may be None, or not be there yet.
    """

    def __init__(self, modules: tuple[nn.Module, ...], skip: tuple[nn.Module, ...]) -> None:
        skipped = set(map(id, skip))
        self._modules = [m for root in modules for m in root.modules() if id(m) not in skipped]
        self._copied: set[BufferKey] | None = None

    @contextmanager
    def watched(self, seen: Seen) -> Iterator[None]:
        """Run a forward inside; afterwards `seen` holds what it saw of what it changed.

        Raises:
            RecomputeError: it changed a buffer in place that no earlier forward changed, so the
            old
                value is lost.
        """
        before = self._now()
        versions = {key: buffer._version for key, buffer in before.items() if buffer is not None}
        keep = versions if self._copied is None else self._copied & versions.keys()
        copies = {key: _copy(before[key]) for key in keep}
        yield
        in_place = {key for key, version in versions.items() if _version(before[key]) != version}
        lost = in_place - copies.keys()
        if lost:
            module, name = next(iter(lost))
            raise RecomputeError(
                f"the forward changed buffer {name!r} of a {type(module).__name__} that no "
                "forward before it changed, so a recompute could not see its old value. Use "
                "recompute=Recompute.NEVER"
            )
        self._copied = in_place | (self._copied or set())
        now = self._now()
        replaced = {k for k in now.keys() | before.keys() if now.get(k) is not before.get(k)}
        seen.buffers = {k: copies.get(k, before.get(k, _ABSENT)) for k in in_place | replaced}

    @contextmanager
    def restored(self, seen: Seen) -> Iterator[None]:
        """Run a forward again inside, with the buffers it saw; then put back what was there."""
        now = {(m, name): m._buffers.get(name, _ABSENT) for m, name in seen.buffers}
        _put(seen.buffers)
        try:
            yield
        finally:
            _put(now)

    def _now(self) -> dict[BufferKey, Tensor | None]:
        return {(m, name): buffer for m in self._modules for name, buffer in m._buffers.items()}


_ABSENT = object()


def _put(buffers: Mapping[BufferKey, Any]) -> None:
    for (module, name), buffer in buffers.items():
        if buffer is _ABSENT:
            module._buffers.pop(name, None)
        else:
            module._buffers[name] = buffer


def _copy(buffer: Tensor | None) -> Tensor:
    assert buffer is not None
    return buffer.clone()


def _version(buffer: Tensor | None) -> int:
    assert buffer is not None
    return buffer._version
