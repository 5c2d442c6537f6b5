"""Steps that others measured, and what the library predicts for the same layouts."""

import argparse
from collections.abc import Iterator, Sequence
from itertools import combinations, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.report import Column, Report, parser, progress, publish, table_lines

from . import alpa_rows, llama_rows, megatron_rows

COLUMNS = (
    Column("model", "model"),
    Column("cards", "hardware"),
    Column("devices", "gpus"),
    Column("positions", "seq"),
    Column("tensor", "tp"),
    Column("pipeline", "pp"),
    Column("chunks", "vp"),
    Column("data", "dp"),
    Column("context", "cp"),
    Column("M", "M"),
    Column("recompute", "ckpt"),
    Column("a stage passes hosts", "passes_hosts"),
    Column("measured: s", "measured_s", ".2f"),
    Column("predicted: s", "predicted_s", ".2f"),
    Column("predicted / measured", "ratio", ".2f"),
    Column("source's table", "table"),
)
OF_MEGATRON = (
    Column("GPT", "model"),
    Column("A100", "gpus"),
    Column("tensor", "tp"),
    Column("pipeline", "pp"),
    Column("chunks", "chunks"),
    Column("data", "data"),
    Column("samples of a micro-batch", "mbs"),
    Column("M", "M"),
    Column("measured: s", "measured_s", ".2f"),
    Column("predicted: s", "predicted_s", ".2f"),
    Column("predicted / measured", "ratio", ".2f"),
)
OF_ALPA = (
    Column("devices", "devices"),
    Column("system", "system"),
    Column("measured: TFLOPS", "measured", ".1f"),
    Column("predicted: TFLOPS", "predicted", ".1f"),
    Column("predicted / measured step", "ratio", ".2f"),
)
SUMMARY = (
    Column("rows", "rows"),
    Column("number", "number"),
    Column("median absolute error", "error", ".1%"),
    Column("pairs in the right order", "order"),
)


class Pair(NamedTuple):
    """Seconds of a step, or in proportion to it."""

    measured: float
    predicted: float


def summary(name: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the error and the order of some rows."""
    right, all_pairs = ordered(pairs)
    errors = [abs(own.predicted / own.measured - 1) for own in pairs]
    return {
        "rows": name,
        "number": len(pairs),
        "error": median(errors) if errors else None,
        "order": f"{right} / {all_pairs}",
    }


def ordered(pairs: Sequence[Pair]) -> tuple[int, int]:
    """Return how many pairs of rows are predicted in the measured order, and how many there are.

    Rows that are measured alike are no pair; rows that are predicted alike are in no order.
    """
    unlike = [(a, b) for a, b in combinations(pairs, 2) if a.measured != b.measured]
    right = [(a.measured < b.measured) == (a.predicted < b.predicted) for a, b in unlike]
    alike = [a.predicted == b.predicted for a, b in unlike]
    return sum(x and not y for x, y in zip(right, alike, strict=True)), len(unlike)


def llama_table(rows: Sequence[llama_rows.Row]) -> Iterator[dict[str, Any]]:
    """Yield the row of each layout."""
    for row in rows:
        progress(f"{row['model']} on {row['gpus']} {row['hardware']}")
        predicted_s = row.predicted_s()
        yield {
            **row.fields,
            "passes_hosts": "yes" if row.passes_hosts else "no",
            "measured_s": row.measured_s,
            "predicted_s": predicted_s,
            "ratio": predicted_s / row.measured_s,
        }


def megatron_table(rows: Sequence[megatron_rows.Row]) -> Iterator[dict[str, Any]]:
    """Yield the row of each model."""
    for row in rows:
        progress(f"GPT of {row.fields['model']} on {row.fields['gpus']} A100")
        predicted_s, layout = row.predicted_s(), row.layout
        yield {
            **row.fields,
            "chunks": layout.virtual,
            "data": layout.data,
            "M": layout.num_microbatches,
            "measured_s": row.measured_s,
            "predicted_s": predicted_s,
            "ratio": predicted_s / row.measured_s,
        }


def alpa_table(rows: Sequence[alpa_rows.Row]) -> Iterator[dict[str, Any]]:
    """Yield the row of each system; nothing is predicted where no plan fits."""
    for row in rows:
        progress(f"{row.system} on {row.devices} V100")
        predicted = row.predicted_tflops()
        yield {
            "devices": row.devices,
            "system": row.system,
            "measured": row.measured_tflops,
            "predicted": predicted,
            "ratio": row.measured_tflops / predicted if predicted else None,
        }


def summaries(
    llama: Sequence[dict[str, Any]],
    megatron: Sequence[dict[str, Any]],
    alpa: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return the summary of all Llama rows, by passing hosts or not, and of both tables of GPT.

    Alpa's rows are compared among systems on equally many devices, all others by seconds a step.
    """
    found = [
        summary("GPT on A100", [Pair(row["measured_s"], row["predicted_s"]) for row in megatron])
    ]
    for name, wanted in (("Llama", "yes no"), ("stages pass hosts", "yes"), ("or not", "no")):
        own = [row for row in llama if row["passes_hosts"] in wanted.split()]
        found.append(summary(name, [Pair(row["measured_s"], row["predicted_s"]) for row in own]))
    counts = dict.fromkeys(row["devices"] for row in alpa)
    of_counts = [
        [
            Pair(1 / row["measured"], 1 / row["predicted"])
            for row in alpa
            if row["devices"] == count and row["predicted"]
        ]
        for count in counts
    ]
    of_all = summary("GPT on V100", [pair for own in of_counts for pair in own])
    right, pairs = (sum(numbers) for numbers in zip(*map(ordered, of_counts), strict=True))
    return [*found, {**of_all, "order": f"{right} / {pairs}"}]


def run(options: argparse.Namespace) -> None:
    """Predict every row, and print."""
    rows, of_alpa = [*llama_rows.rows()], [*alpa_rows.rows()]
    of_megatron = [*megatron_rows.rows()]
    if options.smallest:
        rows, of_megatron, of_alpa = rows[-3:], of_megatron[:1], [*islice(of_alpa, 2)]
    llama, alpa = [*llama_table(rows)], [*alpa_table(of_alpa)]
    megatron = [*megatron_table(of_megatron)]
    notes = (
        *("", *table_lines(SUMMARY, summaries(llama, megatron, alpa))),
        *("", *table_lines(OF_MEGATRON, megatron)),
        *("", *table_lines(OF_ALPA, alpa)),
    )
    report = Report(COLUMNS, tuple(llama), {"fitted constants": "none"}, notes)
    publish(report, options, Path(__file__).parent)


if __name__ == "__main__":
    run(parser(__doc__ or "").parse_args())
