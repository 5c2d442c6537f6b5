"""What all processes must have in common: compared at the start, the first difference named."""

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import ConfigError, MeshError, PenstockError

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

Outcome = tuple[bool, Any]
"""(True, result) or (False, the error that was raised)."""


def outcome_of(job: Callable[[], Any]) -> Outcome:
    """Run `job` and keep what came of it, so that it can be told to others."""
    try:
        return True, job()
    except PenstockError as error:
        return False, error


def result_of(outcome: Outcome) -> Any:
    """Give the result, or raise the error.

    Raises:
        PenstockError: what the job raised, wherever it ran.
    """
    good, value = outcome
    if not good:
        raise value
    return value


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


def require_same(where: str, fields: Mapping[str, Any]) -> None:
    """See that every process gives the same `fields`.

    Raises:
        ConfigError: on every process alike; names the first field that differs, with each value.
    """
    mine = {name: repr(value) for name, value in fields.items()}
    if _is_same_everywhere(mine):
        return
    everyone: list[dict[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for name in mine:
        values = [facts[name] if facts is not None else "?" for facts in everyone]
        if len(set(values)) > 1:
            raise ConfigError(
                f"{where}: the processes do not agree on {name}: {_by_value(values)}. Start all "
                "of them with the same script, arguments and versions"
            )


def _is_same_everywhere(facts: dict[str, str]) -> bool:
    """Compare the digests of what the processes give: few bytes, however many processes."""
    digest = sha256(json.dumps(facts).encode()).digest()
    words = torch.frombuffer(bytearray(digest), dtype=torch.int32).long()
    highest = torch.cat([words, -words])
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return torch.equal(highest, torch.cat([words, -words]))


def _by_value(values: list[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(
        f"{value} on rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}"
        for value, who in ranks.items()
    )
