"""What stands for an object that is not here."""

from typing import Any

from .pytree import Sealed


class StandIn(Sealed):
    """Stands for an object that is not here; whatever is asked of it raises its `_error`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as copies and pickles ask
            raise AttributeError(name)
        raise self._error()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self._error()

    __call__ = __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = _refuse

    def _error(self) -> Exception:
        raise NotImplementedError
