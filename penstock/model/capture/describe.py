"""A captured model as a table."""

from collections.abc import Iterator, Sequence

from penstock.trace.table import columns
from penstock.trace.units import count_text

from .captured import Captured

_HEAD = ("layer", "block", "module", "parameters", "live bytes before")


def described(captured: Captured, names: Sequence[str], counts: Sequence[int]) -> str:
    """Return the table of a model's layers, one for each call of a block, and what is to be known.

    *Live bytes before* is what would cross a cut before the layer, for the example inputs.
    """
    live = captured.live_bytes()
    rows = [
        (str(n), names[n], type(captured.blocks[block]).__name__, f"{counts[n]:,}", f"{live[n]:,}")
        for n, (block, _) in enumerate(captured.calls)
    ]
    head = (
        f"{type(captured.model).__name__}: {count_text(len(rows), 'layer')}, "
        f"{count_text(sum(captured.sizes.values()), 'parameter')}"
    )
    return "\n".join([head, *columns([_HEAD, *rows]), *_remarks(captured, names)])


def _remarks(captured: Captured, names: Sequence[str]) -> Iterator[str]:
    for names_of_one in _tied(captured):
        yield f"tied: {' = '.join(names_of_one)}"
    for first, last in captured.together:
        yield f"together: {names[first]} to {names[last]}"
    if captured.decides:
        yield (
            "decides: what is done between blocks depends on the batch or on random numbers, so "
            "that whatever is alive at a cut crosses it"
        )
    for warning in captured.warnings:
        yield f"warning: {warning}"
    yield captured.checked


def _tied(captured: Captured) -> list[list[str]]:
    known_as: dict[str, list[str]] = {}
    for name, first in captured.parameters.items():
        known_as.setdefault(first, []).append(name)
    return [names for names in known_as.values() if len(names) > 1]
