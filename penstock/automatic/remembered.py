"""What ranges of layers cost in a shape is kept on disk, and so are whole plans.

    the same question again          its plan is read
    another one of the same layers   nothing is solved: prices of shapes are read, and searched

A file of prices holds for one graph, shape, cluster, number of micro-batches, ready plan and price
of a byte, and as one of a plan for our source files.  One that is damaged is found by its digest,
and written anew.
"""

import zlib
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np

from penstock.planner.plan import Plan
from penstock.remembered import cache_file, keep
from penstock.sharding.search import Ranges, Search
from penstock.trace.progress import saying

_NUMBERS = np.dtype("<f8")
CUT_SHORT = "the search was interrupted"
"""How the line of a plan begins that says so."""


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

    def begin(self, byte_s: float, executor: Executor) -> None:
        """Let an executor solve the programs that `of_ranges` needs, from now on."""
        if byte_s in self._known:
            return
        kept = _read(self._file(byte_s))
        if kept is None:
            self._search.begin(byte_s, executor)
            return
        numbers = np.frombuffer(zlib.decompress(kept), _NUMBERS)
        self._known[byte_s] = Ranges(*numbers.reshape(-1, self.num_layers, self.num_layers + 1))

    def of_ranges(self, byte_s: float) -> Ranges:
        """Return what every range of the layers costs as a stage of its own, once it is begun."""
        if byte_s not in self._known:
            with saying(f"dividing layers among {' x '.join(map(str, self.shape))} devices"):
                found = self._search.of_ranges(byte_s)
            kept = np.stack(found).astype(_NUMBERS).tobytes()
            _keep(self._file(byte_s), zlib.compress(kept))
            self._known[byte_s] = found
        return self._known[byte_s]

    def _file(self, byte_s: float) -> Path | None:
        facts = f"{_source()} {self.facts} {byte_s!r}"
        return cache_file("prices", sha256(facts.encode()).hexdigest())

    @cached_property
    def _search(self) -> Search:
        return self.make()


def remembered_plan(facts: str, make: Callable[[], Plan]) -> Plan:
    """Return a plan that was made before, or make it; `facts` are all that it depends on."""
    file = cache_file("plans", sha256(f"{_source()} {facts}".encode()).hexdigest())
    kept = _read(file)
    if kept is not None:
        return Plan.from_json(kept.decode())
    plan = make()
    if not is_cut_short(plan):
        _keep(file, plan.to_json().encode())
    return plan


def is_cut_short(plan: Plan) -> bool:
    """Tell whether the search for a plan was interrupted: it is the best of a part of all."""
    return any(line.startswith(CUT_SHORT) for line in plan.why)


def _read(file: Path | None) -> bytes | None:
    """Return what was kept, None where it is not there or damaged."""
    try:
        content = b"" if file is None else file.read_bytes()
    except OSError:
        return None
    digest, rest = content[:32], content[32:]
    return rest if sha256(rest).digest() == digest else None


def _keep(file: Path | None, content: bytes) -> None:
    if file is not None:
        keep(file, sha256(content).digest() + content)


@cache
def _source() -> str:
    """Say what our source files are: another version finds other costs."""
    folder = Path(__file__).parents[1]
    stats = [(str(file.relative_to(folder)), file.stat()) for file in folder.rglob("*.py")]
    return repr(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))
