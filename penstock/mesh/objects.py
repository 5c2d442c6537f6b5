"""Objects that processes tell each other, as bytes: pickled, as everywhere in torch.distributed.

The processes of a job trust each other.  Tensors never go this way: they would arrive without
their graph, their strides and their device.
"""

import io
import pickle
from typing import Any

from torch import Tensor

from penstock.errors import BoundaryError, MeshError


class _Pickler(pickle.Pickler):
    """Refuses tensors, wherever they are."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            raise BoundaryError(
                f"a tensor of shape {tuple(value.shape)} within an object cannot be told to "
                "another process: tensors in tuples, lists, dicts and dataclasses can"
            )
        return NotImplemented


def encode(value: Any) -> bytes:
    """Return a value as a message.

    Raises:
        BoundaryError: it holds a tensor, or what cannot be pickled.
    """
    found = io.BytesIO()
    try:
        _Pickler(found, pickle.HIGHEST_PROTOCOL).dump(value)
    except BoundaryError:
        raise
    except Exception as error:  # what an object of the user's raises
        raise BoundaryError(
            f"a {type(value).__module__}.{type(value).__qualname__} cannot be told to another "
            f"process: {type(error).__name__}: {error}. Let what crosses stages be pickled: "
            "classes at the top of a module, no open files"
        ) from error
    return found.getvalue()


def decode(message: "bytes | bytearray | memoryview") -> Any:
    """Return the value of a message.

    Raises:
        MeshError: it cannot be read here: a class is not here, or the versions differ.
    """
    try:
        return pickle.loads(message)
    except Exception as error:
        raise MeshError(
            f"a message from another process cannot be read: {type(error).__name__}: {error}. See "
            "that all processes run the same version of Penstock and of your modules"
        ) from error
