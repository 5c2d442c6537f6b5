"""Find the stages that hold each value, from the events of a recording and the partition."""

from collections.abc import Iterable, Mapping
from functools import reduce

from penstock.errors import CutError

from .events import END, ValueId
from .recording import Event

BlockCall = tuple[str, int]
"""A block's name and the number of its call."""
Placed = tuple[Event, int]
"""An event, and the stage that it is on."""


def calls_of(recordings: Iterable[Iterable[Event]]) -> list[BlockCall]:
    """List the block calls of all recordings, in the order of execution.

    One recording may have none: a model may skip its blocks in training, by chance or by a flag,
    and call them in evaluation.  If all have none, that is a CutError.
    """
    in_each = [
        [(e.key.block, e.key.call) for e in events if e.key.number == 0 and e.key.block]
        for events in recordings
    ]
    calls = reduce(_merged, in_each)
    if not calls:
        raise CutError(
            "the model's forward calls none of its blocks, in training or in evaluation, or calls "
            "them where that is not seen: as Kind.forward(block, x), or by a method stored "
            "earlier. Call them as block(x)"
        )
    return calls


def _merged(first: list[BlockCall], second: list[BlockCall]) -> list[BlockCall]:
    """Merge two orders: a call that one mode skips keeps its place in the other."""
    merged, known = list(first), set(first)
    for place, call in enumerate(second):
        if call not in known:
            before = second[place - 1] if place else None
            merged.insert(merged.index(before) + 1 if before in merged else 0, call)
            known.add(call)
    return merged


def stages_of_events(
    events: Iterable[Event], stage_of: Mapping[BlockCall, int], num_stages: int
) -> list[Placed]:
    """Return each event with its stage, which is the stage of the last call before it."""
    placed, stage = [], 0
    for event in events:
        if event.key == END:
            stage = num_stages - 1
        elif event.key.number == 0 and event.key.block:
            stage = max(stage, stage_of.get((event.key.block, event.key.call), stage))
        placed.append((event, stage))
    return placed


def sources_of_blocks(events: Iterable[Event]) -> tuple[dict[str, frozenset[str]], set[str]]:
    """Return the blocks on whose results each block depends, and the blocks chosen by values.

    A chosen block is called right after code between blocks has looked at values.
    """
    behind: dict[ValueId, frozenset[str]] = {}
    sources_of: dict[str, frozenset[str]] = {}
    chosen: set[str] = set()
    is_decided = False
    for event in events:
        sources = frozenset[str]().union(*(behind.get(value, ()) for value in event.uses))
        block = event.key.block if event.key.number == 0 else ""
        if block:
            sources_of[block] = sources | sources_of.get(block, frozenset())
            chosen |= {block} if is_decided else set()
            is_decided, sources = False, sources | {block}
        is_decided = is_decided or event.decides
        for value in (*event.gives, *(new for _, new in event.changes)):
            behind[value] = sources
    return sources_of, chosen


def holders(events: Iterable[Placed]) -> dict[ValueId, tuple[int, ...]]:
    """Return the stages that hold each value in any recording, in order, its producer first."""
    stages_of: dict[ValueId, set[int]] = {}
    for event, stage in events:
        for value in (*event.gives, *event.uses, *(new for _, new in event.changes)):
            stages_of.setdefault(value, set()).add(stage)
    return {value: tuple(sorted(stages)) for value, stages in stages_of.items()}
