"""Table 1 of the paper: the largest models, their parameters and what they keep in memory."""

from collections.abc import Iterable, Sequence

from penstock import Cluster

from .cells import Cell
from .cuts import Cut, as_many_blocks, by_flops
from .models import Subject, amoebanet, transformer
from .paper_step import Setting, Step
from .published import LARGEST_AMOEBANET, LARGEST_TRANSFORMER, Largest

TABLE = "1: largest"
_TRANSFORMER_TARGET = 0.12
_BATCH_TRANSFORMER, _BATCH_AMOEBANET = 32, 128
_COUNTED = 4
"""Samples in the micro-batch of AmoebaNet that is counted; what is kept grows with them."""


def transformers() -> list[Cell]:
    """Compare the Transformers: 32 micro-batches of one sample."""
    found: list[Cell] = []
    for column in LARGEST_TRANSFORMER:
        subject = transformer(*column.size)
        steps = _steps(column, subject, (1,), as_many_blocks, _BATCH_TRANSFORMER, (32,))
        found += _cells(column, subject.name, steps, is_exact=True)
    return found


def amoebanets(columns: Iterable[Largest] = LARGEST_AMOEBANET) -> list[Cell]:
    """Compare the AmoebaNets: 16 micro-batches, or 8 or 32: the paper does not say."""
    found: list[Cell] = []
    for column in columns:
        subject = amoebanet(*column.size)
        counted, every_m = (_COUNTED,), (16, 8, 32)
        steps = _steps(column, subject, counted, by_flops, _BATCH_AMOEBANET, every_m)
        found += _cells(column, subject.name, steps, is_exact=False)
    return found


def cluster_of(num_cores: int, name: str) -> Cluster:
    """Return hosts of 8 cores, as many as it takes."""
    return Cluster.load(name if num_cores <= 8 else f"{num_cores // 8} x {name}")


def _steps(
    column: Largest,
    subject: Subject,
    counted: tuple[int, ...],
    cut: Cut,
    batch_size: int,
    every_m: Sequence[int],
) -> list[Step]:
    """Return the steps of each M; without a pipeline nothing is divided or recomputed."""
    profile = subject.profile(counted)
    is_amoebanet = batch_size == _BATCH_AMOEBANET
    cluster = cluster_of(column.num_devices, "tpu-v2-8" if is_amoebanet else "tpu-v3-8")
    partition = cut(profile, column.num_devices, cluster, 1)
    return [
        Step(Setting(profile, cluster, partition, m, batch_size, column.is_pipeline))
        for m in (every_m if column.is_pipeline else (1,))
    ]


def _cells(column: Largest, model: str, steps: Sequence[Step], *, is_exact: bool) -> list[Cell]:
    first = steps[0]
    number = sum(layer.num_parameters for layer in first.setting.profile.layers)
    printed = round(number / column.million, column.decimals)
    kept = [sum(step.activation_bytes) / column.unit_bytes for step in steps]
    unit = "GB" if column.unit_bytes == 10**9 else "GiB"
    has_target = is_exact and column.is_pipeline
    word = "millions" if column.million == 10**6 else "billions"
    return [
        Cell(
            table=TABLE,
            model=model,
            what=f"{column.name}: {word} of parameters",
            published=column.parameters,
            predicted=printed,
            target=0.0 if is_exact else None,
            form=f".{column.decimals}f",
        ),
        Cell(
            table=TABLE,
            model=model,
            what=f"{column.name}: weights, {unit}",
            published=column.parameter_memory,
            predicted=first.weight_bytes / column.unit_bytes,
        ),
        Cell(
            table=TABLE,
            model=model,
            what=f"{column.name}: activations, {unit}",
            published=column.activation_memory,
            predicted=kept[0],
            others=kept[1:],
            target=_TRANSFORMER_TARGET if has_target else None,
        ),
    ]
