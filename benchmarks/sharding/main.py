"""What dividing operators costs and saves: step time, microseconds, bytes, planning time."""

import argparse
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.report import Column, Load, Report, interleaved, parser, progress, publish
from benchmarks.sharding.contestants import NUM_SHARDS, Size, prepare
from benchmarks.throughput.processes import Processes
from penstock import capture
from penstock.costs.counting.count import record_graph
from penstock.mesh.collectives import Collectives
from penstock.model.layer_list import as_layers
from penstock.runtime.shards.divided import DividedLayer
from penstock.sharding.costs import Costs
from penstock.sharding.routed import routed_calls
from penstock.sharding.stages import plan_sharding
from penstock_recipes.zoo import gpt

SIZES = (Size(2, 64, 128), Size(4, 128, 256), Size(4, 256, 512))
"""The two larger ones are measured; the smallest shows that it runs."""
TIGHT = 0.95
"""Of the bytes of the fastest plan."""
CONTESTANTS = ("Penstock", "by hand", "DTensor")
COLUMNS = (
    Column("measure", "measure"),
    Column("case", "case"),
    Column("figure", "figure", ",.3f"),
    Column("unit", "unit"),
    Column("goal", "goal"),
    Column("reached", "reached"),
)
Row = dict[str, Any]


def row(measure: str, case: str, figure: float, unit: str, goal: str = "", met: Any = "") -> Row:
    """Make a line of the table."""
    reached = "" if goal == "" else "yes" if met else "no"
    return {
        "measure": measure,
        "case": case,
        "figure": figure,
        "unit": unit,
        "goal": goal,
        "reached": reached,
    }


def step_times(processes: Processes, sizes: tuple[Size, ...], rounds: int) -> Iterator[Row]:
    """Measure a step of all contestants in turn."""
    for number, size in enumerate(sizes):
        progress(f"steps of {size}")
        turns = [partial(processes.step, (name, number)) for name in CONTESTANTS]
        ours, hand, peer = (median(own) for own in interleaved(turns, rounds))
        losses = [processes.results((name, number))[0] for name in CONTESTANTS]
        assert max(losses) - min(losses) < 1e-5 * abs(losses[0]), losses
        for name, seconds in zip(CONTESTANTS, (ours, hand, peer), strict=True):
            yield row(f"step, {name}", str(size), seconds * 1e3, "ms")
        ratio = ours / hand
        yield row("Penstock / by hand", str(size), ratio, "", "at most 1.15", ratio <= 1.15)
        yield row("Penstock / DTensor", str(size), ours / peer, "", "below 1", ours < peer)


def per_operator(rounds: int) -> Row:
    """Measure what the calls of a block on an axis of one device take beyond the plain ones."""
    progress("microseconds an operator")
    size = Size(2, 8, 32)
    block, x = size.block(), size.inputs().requires_grad_()
    graph = record_graph(as_layers([block]), x)
    plan = plan_sharding("megatron", graph, ["0"], Costs.usual((2,))).layers[0]
    own = deepcopy(block)
    divided = DividedLayer(0, own, plan, [Collectives()])

    def timed(forward: Callable[[], Any]) -> float:
        start_s = time.thread_time()
        forward().sum().backward()
        return time.thread_time() - start_s

    turns = [
        partial(timed, lambda: divided.call(partial(own, x), {})),
        partial(timed, partial(block, x)),
    ]
    ours, plain = interleaved(turns, rounds * 20)
    added_us = 1e6 * median(a - b for a, b in zip(ours, plain, strict=True)) / len(plan.calls)
    case = f"GPT block {size}, forward and backward, CPU time"
    return row("added to an operator", case, added_us, "µs", "at most 25", added_us <= 25)


def memory(processes: Processes) -> Iterator[Row]:
    """Count what two processes hold."""
    progress("bytes")
    for rank, (own, whole) in enumerate(processes.results(("at rest", 0))):
        share = whole / own
        case = f"zero3, rank {rank} of {NUM_SHARDS}: weights, gradients, optimizer state"
        yield row("whole / own bytes", case, share, "", f"{NUM_SHARDS}", share == NUM_SHARDS)
    counted = processes.results(("saved", 0))[0]
    for name, (held, planned) in counted.items():
        is_near = abs(held / planned - 1) <= 0.1
        yield row("saved / planned bytes", name, held / planned, "", "within 10 %", is_near)


def planning(width: int, batches: tuple[int, ...]) -> Iterator[Row]:
    """Plan a block of GPT-3 175B alone, without a limit of memory and with a tight one."""
    for batch in batches:
        with torch.device("meta"):
            model = gpt(
                num_layers=1, width=width, num_heads=96, num_words=512, max_length=2048
            ).blocks[0]
            x = torch.zeros(batch, 2048, width, requires_grad=True)
        graph = record_graph(as_layers([model]), x)
        for mesh in ((8,), (2, 4), (8, 8)):
            progress(f"planning on {mesh}, batch {batch}")
            costs, calls = Costs.usual(mesh), routed_calls(graph, 0)
            plan = partial(plan_sharding, "auto", graph, ["0"], costs)
            seconds, free = _timed(plan)
            own = costs.layer_bytes(graph, calls, "0", free.layers[0])
            tight_s, _ = _timed(partial(plan, None, round(own * TIGHT)))
            case = f"GPT-3 175B block, batch {batch}, mesh {mesh}"
            yield row("planning", case, seconds, "s", "below 1", seconds < 1)
            yield row(
                f"planning, {TIGHT} of the bytes", case, tight_s, "s", "below 1", tight_s < 1
            )


def whole_plan() -> Row:
    """Plan a small GPT of four blocks on two axes."""
    words = torch.zeros(4, 8, dtype=torch.long)
    model: nn.Module = gpt(num_layers=4, width=16, num_heads=4, num_words=32, max_length=8)
    layers = capture(model, words)
    graph, names = record_graph(layers, words), [step.path for step in layers]
    seconds, _ = _timed(partial(plan_sharding, "auto", graph, names, Costs.usual((2, 2))))
    return row(
        "planning", "GPT of 4 tiny blocks, mesh (2, 2)", seconds, "s", "below 5", seconds < 5
    )


def _timed(plan: Callable[[], Any]) -> tuple[float, Any]:
    start_s = time.perf_counter()
    found = plan()
    return time.perf_counter() - start_s, found


def run(options: argparse.Namespace) -> Report:
    """Measure everything."""
    load = Load.now()
    torch.set_num_threads(1)
    rounds = 1 if options.smallest else options.rounds
    sizes = SIZES[:1] if options.smallest else SIZES[1:]
    processes = Processes(prepare, sizes, (), NUM_SHARDS)
    try:
        rows = [*step_times(processes, sizes, rounds), *memory(processes)]
    finally:
        processes.close()
    rows.append(per_operator(rounds))
    rows += planning(*((768, (2,)) if options.smallest else (12288, (2, 8))))
    rows.append(whole_plan())
    aims = [own for own in rows if own["goal"]]
    said = f"{sum(own['reached'] == 'yes' for own in aims)} of {len(aims)} goals reached."
    settings = {"rounds": rounds, "load before": f"{load.before:.2f}"}
    return Report(COLUMNS, tuple(rows), settings, (said, *load.notes))


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=30, help="after one of warm-up")
    chosen = options.parse_args(arguments)
    publish(run(chosen), chosen, Path(__file__).parent)


if __name__ == "__main__":
    main()
