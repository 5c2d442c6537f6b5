"""What all processes must have in common: compared at the start, the first difference named."""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256

import torch
from torch import Tensor

from penstock.errors import ConfigError, MeshError

CALLS = (
    "eval_step",
    "train_step",
    "save_checkpoint",
    "load_checkpoint",
    "clip_grad_norm_",
    "load_pretrained",
    "save_pretrained",
    "GradScaler",
    "zero_optimizer",
    "step of zero_optimizer",
)
"""What all processes do together.  Each begins with a row of numbers: its place here, the number
of the pipeline that it is for, and what else the processes must know of each other.
"""
ROW_WIDTH = 8


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
