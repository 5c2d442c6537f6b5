"""Buffers that a forward changes, so that a recompute sees what the forward saw."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from penstock.errors import RecomputeError

BufferKey = tuple[nn.Module, str]


@dataclass(slots=True)
class SeenBuffers:
    """Values of the changing buffers as one forward saw them."""

    values: dict[BufferKey, Tensor]


class ChangingBuffers:
    """Finds out which buffers of a stage its forward changes, and keeps what each forward saw.

    The first forward keeps a copy of every buffer; from then on only those seen to change.
    """

    def __init__(self, modules: tuple[nn.Module, ...], skip: tuple[nn.Module, ...]) -> None:
        skipped = set(map(id, skip))
        self._keys: list[BufferKey] = [
            (module, name)
            for root in modules
            for module in root.modules()
            if id(module) not in skipped
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._changing: set[BufferKey] | None = None

    @contextmanager
    def watched(self) -> Iterator[SeenBuffers]:
        """Run a forward inside; afterwards the given value holds what it saw of what it changed.

        Raises:
            RecomputeError: it changed a buffer that no earlier forward changed, so the old value
            is lost.
        """
        seen = SeenBuffers({})
        if not self._keys:
            yield seen
            return
        keep = self._keys if self._changing is None else self._changing
        copies = {key: _buffer(key).clone() for key in keep}
        before = [(key, _buffer(key), _buffer(key)._version) for key in self._keys]
        yield seen
        changed = {
            k
            for k, buffer, version in before
            if _buffer(k) is not buffer or buffer._version != version
        }
        lost = changed - copies.keys()
        if lost:
            module, name = next(iter(lost))
            raise RecomputeError(
                f"the forward changed buffer {name!r} of a {type(module).__name__} that no "
                "forward before it changed, so a recompute could not see its old value. Use "
                "recompute=Recompute.NEVER"
            )
        self._changing = changed if self._changing is None else self._changing | changed
        seen.values = {key: copies[key] for key in changed}

    @contextmanager
    def restored(self, seen: SeenBuffers) -> Iterator[None]:
        """Run a forward again inside, with the buffers it saw; then put back what was there."""
        now = {key: _buffer(key) for key in seen.values}
        for (module, name), value in seen.values.items():
            module._buffers[name] = value
        try:
            yield
        finally:
            for (module, name), value in now.items():
                module._buffers[name] = value


def _buffer(key: BufferKey) -> Tensor:
    module, name = key
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer
