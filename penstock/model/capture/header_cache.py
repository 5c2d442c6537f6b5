"""A cache of what a stage has told the next ones, so that the same is the same object again."""

from dataclasses import dataclass, field

from penstock.model.compare import is_same
from penstock.model.pytree import Leaf, Sealed

from .events import EventKey, Header, Told

_MOST_HEADERS = 64
"""A stage that has seen so many different ones forgets them: sizes change with each batch."""


class SealedHeader(Sealed):
    """What happened on the stages before, as it travels; one object for micro-batches alike."""

    def __init__(self, header: Header) -> None:
        self.header = header


@dataclass(slots=True)
class HeaderCache:
    """What a stage told before.

    `told` has each event as it was last; `one_new` those of them that gave one tensor, a new one,
    and changed none.
    """

    told: dict[EventKey, Told] = field(default_factory=dict)
    one_new: dict[EventKey, Told] = field(default_factory=dict)
    headers: dict[tuple[int, ...], SealedHeader] = field(default_factory=dict)

    def same(self, key: EventKey, told: Told) -> Told:
        """Return what an event gave; as the same object, if it is what it gave before."""
        before = self.told.get(key)
        if before is not None and _is_same(before, told):
            return before
        self.told[key] = told
        if type(told.structure) is Leaf and not told.changed and told.infos[0].value.event == key:
            self.one_new[key] = told
        else:
            self.one_new.pop(key, None)
        return told

    def sealed(self, header: Header) -> SealedHeader:
        """Return a header as it travels: the same object for the same events."""
        found = self.headers.get(key := tuple(map(id, header.values())))
        if found is None:
            if len(self.headers) == _MOST_HEADERS:
                self.headers.clear()
            found = self.headers[key] = SealedHeader(header)
        return found


def _is_same(one: Told, other: Told) -> bool:
    facts = one.name == other.name and one.infos == other.infos and one.changed == other.changed
    return facts and is_same(one.structure, other.structure)
