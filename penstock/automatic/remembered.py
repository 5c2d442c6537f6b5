"""What ranges of layers cost in a shape is kept on disk: planned again, nothing is solved.

A file holds for one graph, shape, cluster, number of micro-batches, ready plan and price of a
byte, and for our source files.  One that is damaged is found by its digest, and written anew.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np

from penstock.remembered import cache_file, keep
from penstock.sharding.search import Ranges, Search
from penstock.trace.progress import saying

_NUMBERS = np.dtype("<f8")


@dataclass
class RememberedSearch:
    """The search of a shape, which is made where what it finds is not on disk; `facts` are all
    that this depends on.
    """

    facts: str
    make: Callable[[], Search]
    shape: tuple[int, ...]
    num_layers: int
    _known: dict[float, Ranges] = field(default_factory=dict)

    def of_ranges(self, byte_s: float) -> Ranges:
        """Return what every range of the layers costs as a stage of its own."""
        if byte_s not in self._known:
            self._known[byte_s] = self._found(byte_s)
        return self._known[byte_s]

    def _found(self, byte_s: float) -> Ranges:
        facts = f"{_source()} {self.facts} {byte_s!r}"
        file = cache_file("prices", sha256(facts.encode()).hexdigest())
        kept = None if file is None else _read(file)
        if kept is not None:
            return Ranges(*kept.reshape(-1, self.num_layers, self.num_layers + 1))
        with saying(f"dividing layers among {' x '.join(map(str, self.shape))} devices"):
            found = self._search.of_ranges(byte_s)
        if file is not None:
            content = zlib.compress(np.stack(found).astype(_NUMBERS).tobytes())
            keep(file, sha256(content).digest() + content)
        return found

    @cached_property
    def _search(self) -> Search:
        return self.make()


def _read(file: Path) -> "np.ndarray[tuple[int], np.dtype[np.float64]] | None":
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, numbers = content[:32], content[32:]
    if sha256(numbers).digest() != digest:
        return None
    return np.frombuffer(zlib.decompress(numbers), _NUMBERS)


@cache
def _source() -> str:
    """Say what our source files are: another version finds other costs."""
    folder = Path(__file__).parents[1]
    stats = [(str(file.relative_to(folder)), file.stat()) for file in folder.rglob("*.py")]
    return repr(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))
