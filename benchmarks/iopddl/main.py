"""What the solver of penstock.sharding finds on public planning problems in a contest's time."""

import argparse
import gzip
import json
import math
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy

from benchmarks.iopddl import peer
from benchmarks.iopddl.solver.problem import Edge, Numbers, Problem, Value, evaluate
from benchmarks.iopddl.solver.search import solve
from benchmarks.report import Column, Load, Report, parser, progress, publish
from penstock.errors import PlanError

FORBIDDEN = 10**18
"""A cost from which on the instances mean that a choice is forbidden."""


class Published(NamedTuple):
    """Seconds that the contest allowed, and costs that it published: the winner's and XLA's."""

    limit_s: float
    winner: int
    xla: int


PUBLISHED = {
    "asplos-2025-iopddl-A": Published(60, 6_569_457_676, 13_214_846_074),
    "asplos-2025-iopddl-B": Published(60, 532_843, 990_205),
    "asplos-2025-iopddl-G": Published(120, 217_039, 1_264_777),
    "asplos-2025-iopddl-P": Published(240, 662_197_407_330, 651_833_115_436),
}

COLUMNS = (
    Column("instance", "instance"),
    Column("nodes", "nodes", ","),
    Column("edges", "edges", ","),
    Column("feasible", "feasible"),
    Column("cost", "cost", ",.0f"),
    Column("bound", "bound", ",.0f"),
    Column("gap", "gap", ".2%"),
    Column("proven", "proven"),
    Column("peak / limit", "peak", ".3f"),
    Column("read: s", "read_s", ".1f"),
    Column("solve: s", "solve_s", ".1f"),
    Column("of at most: s", "limit_s", ".0f"),
    Column("ours / winner's", "ours", ".4f"),
    Column("XLA's / winner's", "xla", ".4f"),
)
OF_PEER = (
    Column("peer: feasible", "peer_feasible"),
    Column("peer: cost", "peer_cost", ",.0f"),
    Column("peer: s", "peer_s", ".1f"),
    Column("ours / peer's", "ours_to_peer", ".4f"),
)


def read(path: Path) -> tuple[str, Problem]:
    """Read an instance in the contest's JSON, compressed or not; return its name, too."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        whole = json.load(file)["problem"]
    nodes, edges = whole["nodes"], whole["edges"]
    costs = [_costs(own) for own in nodes["costs"]]
    pairs = zip(edges["nodes"], edges["costs"], strict=True)
    problem = Problem(
        costs=costs,
        edges=[Edge(a, b, _costs(c).reshape(len(costs[a]), len(costs[b]))) for (a, b), c in pairs],
        usages=[numpy.array(own, float) for own in nodes["usages"]],
        alive=[(start, end) for start, end in nodes["intervals"]],
        limit=whole["usage_limit"],
    )
    return whole["name"], problem


def _costs(values: list[int]) -> Numbers:
    found = numpy.array(values, float)
    found[found >= FORBIDDEN] = math.inf
    return found


def made(num_nodes: int) -> tuple[str, Problem]:
    """Make a random instance, to see that the benchmark runs."""
    rng = numpy.random.default_rng(0)
    ends = [(i, int(rng.integers(i + 1, num_nodes))) for i in range(num_nodes - 1)]
    problem = Problem(
        costs=[rng.integers(0, 1000, 4).astype(float) for _ in range(num_nodes)],
        edges=[Edge(a, b, rng.integers(0, 1000, (4, 4)).astype(float)) for a, b in ends],
        usages=[rng.integers(1, 9, 4).astype(float) for _ in range(num_nodes)],
        alive=[(i, i + 3) for i in range(num_nodes)],
        limit=12.0,
    )
    return "random", problem


def measure(name: str, problem: Problem, read_s: float, options: argparse.Namespace) -> Any:
    """Solve an instance in what reading it left of the time; evaluate the answer anew."""
    published = PUBLISHED.get(name)
    limit_s = options.seconds or (published.limit_s if published else 60.0)
    row: dict[str, Any] = {"instance": name, "nodes": len(problem.costs), "read_s": read_s}
    row |= {"edges": len(problem.edges), "limit_s": limit_s}
    begin_s = perf_counter()
    try:
        found = solve(problem, limit_s - read_s, options.seed)
    except PlanError as error:
        progress(str(error))
        return row | {"feasible": "no", "solve_s": perf_counter() - begin_s}
    row["solve_s"] = perf_counter() - begin_s
    value = evaluate(problem, found.choices)
    row["cost"], row["bound"] = value.cost, found.bound
    row["feasible"] = "yes" if _is_feasible(problem, value) else "no"
    row["gap"] = None if found.bound is None else (value.cost - found.bound) / abs(value.cost)
    row["proven"] = "yes" if found.is_proven else "no"
    row["peak"] = value.peak / problem.limit
    if published:
        row["ours"] = value.cost / published.winner
        row["xla"] = published.xla / published.winner
    return row


def _is_feasible(problem: Problem, value: Value) -> bool:
    return value.cost < math.inf and value.peak <= problem.limit


def beside(problem: Problem, row: dict[str, Any]) -> dict[str, Any]:
    """Solve an instance with the peer in the same time, and evaluate its answer as ours."""
    begin_s = perf_counter()
    choices = peer.solve(problem, row["limit_s"] - row["read_s"])
    found: dict[str, Any] = {"peer_s": perf_counter() - begin_s, "peer_feasible": "no"}
    if choices is not None and _is_feasible(problem, value := evaluate(problem, choices)):
        found |= {"peer_feasible": "yes", "peer_cost": value.cost}
        if row["feasible"] == "yes":
            found["ours_to_peer"] = row["cost"] / value.cost
    return found


def run(options: argparse.Namespace) -> Report:
    """Read and solve every instance."""
    load = Load.now()
    rows = []
    for path in options.instances or [None]:
        progress(f"{path or 'a random instance'}")
        begin_s = perf_counter()
        name, problem = read(path) if path else made(30)
        rows.append(measure(name, problem, perf_counter() - begin_s, options))
        if options.peer and peer.is_installed():
            rows[-1] |= beside(problem, rows[-1])
    proven = sum(row.get("proven") == "yes" for row in rows)
    verdict = f"{proven} of {len(rows)} solved and proven in time."
    settings = {"seed": options.seed, "load before": f"{load.before:.2f}"}
    notes = [verdict, *load.notes]
    if options.peer and not peer.is_installed():
        notes.append(f"{peer.NAME} is left out: it is not installed.")
    columns = (*COLUMNS, *OF_PEER) if options.peer and peer.is_installed() else COLUMNS
    return Report(columns, tuple(rows), settings, tuple(notes))


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument(
        "instances", nargs="*", type=Path, metavar="FILE", help="left out: a small random one"
    )
    options.add_argument("--seconds", type=float, help="for each; left out: the contest's")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--peer", action="store_true", help=f"solve with {peer.NAME}, too")
    chosen = options.parse_args(arguments)
    publish(run(chosen), chosen, Path(__file__).parent)


if __name__ == "__main__":
    main()
