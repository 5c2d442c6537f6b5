"""What stands for an object that is not here."""

from typing import Any, NoReturn

from .pytree import Sealed


class StandIn(Sealed):
    """Stands for an object that is not here; whatever is asked of it raises its `_error`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as copies and pickles ask
            raise AttributeError(name)
        raise self._error()

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise why it is not here."""
        raise self._error()

    __call__ = __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = __float__ = refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = refuse

    def _error(self) -> Exception:
        raise NotImplementedError
