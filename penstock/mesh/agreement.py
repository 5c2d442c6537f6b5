"""Messages between processes, their comparison, and the outcome of a job told to others.

Objects are pickled, as everywhere in torch.distributed: the processes of a job trust each other.
Tensors are refused: they would arrive without their graph, their strides and their device.
"""

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import BoundaryError, ConfigError, MeshError, PeerError, PenstockError

CALLS = (
    "eval_step",
    "train_step",
    "save_checkpoint",
    "load_checkpoint",
    "clip_grad_norm_",
    "load_pretrained",
    "save_pretrained",
    "GradScaler",
    "pipe(inputs)",
    "backward() of pipe(inputs)",
)
"""Calls that every process makes.  Each begins with one all-gather of a row of numbers: the
call's index here, the pipeline's number, and values of the call.
"""
ROW_WIDTH = 11
"""Numbers in such a row."""


def check_same_kind(rows: Sequence[Sequence[float]], pipelines: Sequence[str]) -> None:
    """Raise MeshError, on every process, if they began unlike calls, or of unlike pipelines."""
    for rank, row in enumerate(rows):
        if row[:2] == rows[0][:2]:
            continue
        calls = [f"rank {r} began {CALLS[int(rows[r][0])]}" for r in (0, rank)]
        if row[1] != rows[0][1]:
            descriptions = (pipelines[int(rows[r][1])] for r in (0, rank))
            calls = [f"{call} of {text}" for call, text in zip(calls, descriptions, strict=True)]
        raise MeshError(
            f"the processes do not do the same: {' and '.join(calls)}. Every process must "
            "make every call, in the same order (no `if rank == 0` around a step or a save), and "
            "for the same pipeline"
        )


def name_difference(where: str, facts_of_ranks: Sequence[Mapping[str, str]]) -> None:
    """Raise ConfigError with the first of the ranks' facts that differs, and each value."""
    for name in facts_of_ranks[0]:
        ranks: dict[str, list[str]] = {}
        for rank, facts in enumerate(facts_of_ranks):
            ranks.setdefault(facts.get(name, "?"), []).append(str(rank))
        if len(ranks) > 1:
            values = "; ".join(
                f"{value} on rank{'s' if len(of_value) > 1 else ''} {', '.join(of_value)}"
                for value, of_value in ranks.items()
            )
            raise ConfigError(
                f"{where}: the processes do not agree on {name}: {values}. Start all "
                "of them with the same script, arguments and versions"
            )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a job, or the error that it raised in this process."""

    value: Any = None
    error: Exception | None = None

    def result(self) -> Any:
        """Return the result, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value

    def told(self) -> tuple[str, Any]:
        """Return plain data for other processes: the class of the error, or "", and its text."""
        if self.error is None:
            return "", self.value
        text = str(self.error)
        notes = [text, *getattr(self.error, "__notes__", [])]
        return type(self.error).__name__, notes


def outcome_of(job: Callable[[], Any]) -> Outcome:
    """Run a job; return its result or its error."""
    try:
        return Outcome(job())
    except Exception as error:
        return Outcome(error=error)


def result_of(message: tuple[str, Any], teller: str) -> Any:
    """Return the result that another process told, or raise its error; if unknown, a PeerError."""
    name, content = message
    if not name:
        return content
    text, *notes = content
    # Subclasses of other packages count too: look through the whole tree.
    classes: list[type[PenstockError]] = [PenstockError]
    for known in classes:
        classes += known.__subclasses__()
    kind = next((known for known in classes if known.__name__ == name), None)
    if kind is None:
        raise PeerError(
            f"{teller} failed: {'; '.join([f'{name}: {text}', *notes])}", complete=True
        )
    error = kind.__new__(kind)  # not __init__: its arguments are unknown here
    error.args = (text,)
    error.__notes__ = notes
    raise error


def gather_messages(message: bytes, size: int, group: Any = None) -> list[bytes]:
    """Return the messages of all `size` processes of a torch process group."""
    messages: list[Any] = [None] * size
    dist.all_gather_object(messages, message, group)
    return messages


def broadcast_message(message: bytes, source: int, group: Any = None) -> bytes:
    """Return the message of global rank `source` to all of a torch process group."""
    box: list[Any] = [message]
    dist.broadcast_object_list(box, source, group, device=torch.device("cpu"))
    return bytes(box[0])


def told_by_first(value: Any) -> Any:
    """Return rank 0's value to all processes after the rendezvous, before there is a mesh."""
    return decode(broadcast_message(encode(value), 0))


class _Pickler(pickle.Pickler):
    """Refuse tensors at any depth."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            raise BoundaryError(
                f"a tensor of shape {tuple(value.shape)} within an object cannot be told to "
                "another process: tensors in tuples, lists, dicts and dataclasses can"
            )
        return NotImplemented


def encode(value: Any) -> bytes:
    """Return a value as a message; BoundaryError if it holds a tensor, or cannot be pickled."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    except BoundaryError:
        raise
    except Exception as error:  # what an object of the user's raises
        raise BoundaryError(
            f"a {type(value).__module__}.{type(value).__qualname__} cannot be told to another "
            f"process: {type(error).__name__}: {error}. Let what crosses stages be pickled: "
            "classes at the top of a module, no open files"
        ) from error
    return buffer.getvalue()


def decode(message: "bytes | bytearray | memoryview") -> Any:
    """Return the value of a message; MeshError if a class is missing here, or versions differ."""
    try:
        return pickle.loads(message)
    except Exception as error:
        raise MeshError(
            f"a message from another process cannot be read: {type(error).__name__}: {error}. See "
            "that all processes run the same version of Penstock and of your modules"
        ) from error
