"""Refuse state that stages share outside their messages: it would mix micro-batches.

    stage 0  F0 F1 F2 ──writes──► store["mask"] ◄──reads── F0  stage 1

`parties_of` finds the objects that several stages can reach.  The first steps watch whether these
change from one micro-batch to the next.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import StateError
from penstock.model.compare import is_same_plain
from penstock.model.entries import version_of
from penstock.model.reach import FILLED, Party, Variables, content, shared
from penstock.model.state import ABSENT
from penstock.torch_private import without_torch_function

from .run import Run
from .stage.tape import Tape

_WATCHED_RUNS = 3
"""Number of runs to watch with gradients, and as many without."""


class _Mark(NamedTuple):
    """A value at one moment, and its version if it is a tensor."""

    value: Any
    version: int


@dataclass(frozen=True, slots=True)
class _Shared:
    """An object that layers or losses of several stages reach, by its key."""

    key: Any
    parties: Sequence[Party]

    @property
    def holder(self) -> Any:
        return self.parties[0].found[self.key].holder

    def is_read_across(self, name: Any, stage_of: Sequence[int]) -> bool:
        """Tell whether one stage may use a name of the holder and another stage may read it."""
        users = [party for party in self.parties if party.may_use(self.key, name)]
        is_across = len({stage_of[party.layer] for party in users}) > 1
        return is_across and any(party.may_read(self.key, name) for party in users)

    def pair(self, name: Any, stage_of: Sequence[int]) -> tuple[Party, Party] | None:
        """Return a party that may use a name, and one on another stage that may read it."""
        name = None if isinstance(self.holder, FILLED) else name
        users = [party for party in self.parties if party.may_use(self.key, name)]
        readers = [party for party in users if party.may_read(self.key, name)]
        pairs = [
            (user, reader)
            for user, reader in product(users, readers)
            if stage_of[user.layer] != stage_of[reader.layer]
        ]
        # Prefer a pair whose user writes and whose reader does not: that is the likely fault.
        writes = partial(Party.may_write, key=self.key, name=name)
        return max(pairs, key=lambda pair: writes(pair[0]) - writes(pair[1]), default=None)


class Aside:
    """Watches, in the first runs, the state that layers and the loss share across stages.

    `across`: stages are in several processes, so one stage's writes never reach the others.
    """

    def __init__(self, parties: Sequence[Party], stage_of: Sequence[int], *, across: bool) -> None:
        self.parties, self._stage_of, self._across = parties, stage_of, across
        self._lock = threading.Lock()
        self._left = {True: _WATCHED_RUNS, False: _WATCHED_RUNS}
        self._written = frozenset[str]().union(*(party.writes for party in parties))
        self._shared = list(self._across_stages(parties))
        self.has_shared = bool(self._shared)
        """True if stages share any state."""
        self._marks: dict[tuple[Any, Any], _Mark] = {}
        self._changed: dict[tuple[Any, Any], set[tuple[int, int]]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Aside, across=self._across), ((), ())  # a copy has other layers

    def _across_stages(self, parties: Sequence[Party]) -> Iterator[_Shared]:
        for key, several in shared(parties).items():
            if len({self._stage_of[party.layer] for party in several}) > 1:
                one = _Shared(key, several)
                if isinstance(one.holder, FILLED):
                    is_used = one.is_read_across(None, self._stage_of)
                else:  # attributes may come later, if code writes them
                    later = () if isinstance(one.holder, Variables) else self._written
                    names = {*self._states(one.holder), *later}
                    is_used = any(one.is_read_across(name, self._stage_of) for name in names)
                if is_used:
                    yield one

    def _states(self, holder: Any) -> dict[Any, Any]:
        """Return a holder's attributes that may change: tensors, and names that code writes."""
        held = content(holder)
        if isinstance(holder, FILLED):
            return held
        return {n: v for n, v in held.items() if n in self._written or isinstance(v, Tensor)}

    def begin(self, run: Run) -> "Aside | None":
        """Watch a run if its shared state can differ; else return None."""
        can_differ = len(run.batch.sizes) > 1 or self._across
        if not (can_differ and self._left[run.caller.with_grad]):
            return None
        self._left[run.caller.with_grad] -= 1
        if not self._across:
            self._changed.clear()
        self._marks = dict(self._look())
        return self

    def end(self) -> None:
        """Drop the references to the watched values."""
        self._marks.clear()

    def look(self, run: Run, tape: Tape) -> None:
        """Raise StateError if state that another stage may read changes a second time."""
        with self._lock:
            now = dict(self._look())
            before, self._marks = self._marks, now
            places = before.keys() | now.keys()
            for place in (p for p in places if not _is_same(before.get(p), now.get(p))):
                seen = self._changed.setdefault(place, set())
                seen.add((run.streams.step, tape.microbatch))
                if len(seen) > 1:
                    self._refuse(place)

    def _look(self) -> Iterator[tuple[tuple[Any, Any], _Mark]]:
        for one in self._shared:
            for name, value in self._states(one.holder).items():
                yield (one.key, name), _Mark(value, _version(value))

    def _refuse(self, place: tuple[Any, Any]) -> None:
        key, name = place
        one = next(one for one in self._shared if one.key == key)
        pair = one.pair(name, self._stage_of)
        if pair is None:  # each stage has its own, or only fills it
            return
        user, reader = pair
        raise StateError(
            f"{_said(user, one, name)} is used by {user.label} on stage "
            f"{self._stage_of[user.layer]} and read by {reader.label} on stage "
            f"{self._stage_of[reader.layer]}, and changes from micro-batch to micro-batch: "
            "stages run several at a time, or in processes of their own, so that it would come "
            "from another micro-batch. Give it as a value: penstock.Layer(module, "
            'outputs=("x", "name")) and penstock.Layer(module, inputs=("x", "name")), or in what '
            "the last layer returns for the loss; or keep both on one stage (partition=)"
        )


def _said(party: Party, one: _Shared, name: Any) -> str:
    """Name a place as a party reaches it."""
    path = party.found[one.key].path
    match one.holder:
        case dict():
            return f"{path}[{name!r}]"
        case list() | set() | deque():
            return path
        case nn.Module():
            return f"{path}.{name}" if path else f"attribute {name!r} of {party.label}"
        case _:
            return f"{name!r} ({path})"


def _is_same(one: _Mark | None, other: _Mark | None) -> bool:
    old, new = one or _Mark(ABSENT, 0), other or _Mark(ABSENT, 0)
    if old.value is new.value:
        return old.version == new.version
    a, b = old.value, new.value
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        is_plain = type(a) is Tensor and type(b) is Tensor and not (a.is_meta or b.is_meta)
        alike = is_plain and (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape)
        return alike and _version(a) == old.version and torch.equal(a, b)
    if isinstance(old.value, tuple) and isinstance(new.value, tuple):
        pairs = zip(old.value, new.value, strict=False)
        alike = len(old.value) == len(new.value)
        return alike and all(_is_same(_Mark(a, 0), _Mark(b, 0)) for a, b in pairs)
    return is_same_plain(old.value, new.value)


def _version(value: Any) -> int:
    with without_torch_function():  # a parameter that another stage has refuses what it is asked
        return version_of(value) if isinstance(value, Tensor) else 0
