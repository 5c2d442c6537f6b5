"""What all processes must have in common, compared at the start, the first difference named; and
how what one says, or what became of its job, gets to the others.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import ConfigError, MeshError, PeerError, PenstockError

from .objects import decode, encode

CALLS = (
    "eval_step",
    "train_step",
    "save_checkpoint",
    "load_checkpoint",
    "clip_grad_norm_",
    "load_pretrained",
    "save_pretrained",
    "GradScaler",
)
"""What all processes do together.  Each begins with a row of numbers: its place here, the number
of the pipeline that it is for, and what else the processes must know of each other.
"""
ROW_WIDTH = 11


def kind_of_call(kind: str) -> float:
    """Return the number of a kind of call."""
    return float(CALLS.index(kind))


def check_same_kind(rows: Sequence[Sequence[float]], pipelines: Sequence[str]) -> None:
    """Compare the kinds of calls that the processes begin, and the pipelines these are for.

    Raises:
        MeshError: they differ; on every process alike.
    """
    for rank, row in enumerate(rows):
        if row[:2] == rows[0][:2]:
            continue
        began = [f"rank {r} began {CALLS[int(rows[r][0])]}" for r in (0, rank)]
        if row[1] != rows[0][1]:
            of_both = (pipelines[int(rows[r][1])] for r in (0, rank))
            began = [f"{call} of {which}" for call, which in zip(began, of_both, strict=True)]
        raise MeshError(
            f"the processes do not do the same: {' and '.join(began)}. Every process must "
            "make every call, in the same order (no `if rank == 0` around a step or a save), and "
            "for the same pipeline"
        )


def digest(facts: Mapping[str, str]) -> Tensor:
    """Return the digest of what a process was given, as numbers that can be negated."""
    found = sha256(json.dumps(facts).encode()).digest()
    return torch.frombuffer(bytearray(found), dtype=torch.int32).long()


def name_difference(where: str, everyone: Sequence[Mapping[str, str]]) -> None:
    """Say what the processes do not agree on.

    Raises:
        ConfigError: names the first fact that differs, with each value.
    """
    for name in everyone[0]:
        values = [facts.get(name, "?") for facts in everyone]
        if len(set(values)) > 1:
            raise ConfigError(
                f"{where}: the processes do not agree on {name}: {_by_value(values)}. Start all "
                "of them with the same script, arguments and versions"
            )


def _by_value(values: list[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(
        f"{value} on rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}"
        for value, who in ranks.items()
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job returned, or raised in this process."""

    value: Any = None
    error: Exception | None = None

    def result(self) -> Any:
        """Return what the job returned, or raise what it raised."""
        if self.error is not None:
            raise self.error
        return self.value

    def told(self) -> tuple[str, Any]:
        """Return it as plain data: the class of the error, "" for none, and what it says."""
        if self.error is None:
            return "", self.value
        text = str(self.error)
        notes = [text, *getattr(self.error, "__notes__", [])]
        return type(self.error).__name__, notes


def outcome_of(job: Callable[[], Any]) -> Outcome:
    """Run a job and keep what came of it."""
    try:
        return Outcome(job())
    except Exception as error:
        return Outcome(error=error)


def result_of(told: tuple[str, Any], teller: str) -> Any:
    """Return the result that another process told of, or raise its error.

    Raises:
        PenstockError: the job raised one like this there.
        PeerError: it raised something else.
    """
    name, said = told
    if not name:
        return said
    text, *notes = said
    kind = _errors(PenstockError).get(name)
    if kind is None:
        raise PeerError(
            f"{teller} failed: {'; '.join([f'{name}: {text}', *notes])}", complete=True
        )
    error = kind.__new__(kind)
    error.args = (text,)
    error.__notes__ = notes
    raise error


def gather_messages(message: bytes, size: int, group: Any = None) -> list[bytes]:
    """Return the messages of all `size` processes of a group of torch."""
    found: list[Any] = [None] * size
    dist.all_gather_object(found, message, group)
    return found


def broadcast_message(message: bytes, source: int, group: Any = None) -> bytes:
    """Return the message of the process with rank `source`, to all of a group of torch."""
    found: list[Any] = [message]
    dist.broadcast_object_list(found, source, group, device=torch.device("cpu"))
    return bytes(found[0])


def told_by_first(value: Any) -> Any:
    """Return rank 0's value to all processes that have met; for before there is a mesh."""
    return decode(broadcast_message(encode(value), 0))


def _errors(base: type[PenstockError]) -> dict[str, type[PenstockError]]:
    """Return an error class and all that are derived from it, other packages' too, by name."""
    found = {base.__name__: base}
    for derived in base.__subclasses__():
        found |= _errors(derived)
    return found
