"""Partition: AmoebaNet-D's stages balanced by measured time, against stages of equal layers."""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.report import (
    Column,
    Load,
    Report,
    counts,
    interleaved,
    parser,
    progress,
    publish,
)
from penstock import Layers, Pipeline, Transport, capture
from penstock.planner.cuts import balance
from penstock.planner.shared_cores import num_cores
from penstock.schedules.ir import Backward, Forward, Recompute
from penstock.simulator import Costs, simulate
from penstock_recipes.zoo import amoebanet_d

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AUXILIARY_WEIGHT = 0.4
NUM_CLASSES = 10
EQUAL = "equal"
KINDS = (Forward, Recompute, Backward)

COLUMNS = (
    Column("K", "num_stages"),
    Column("stages", "name"),
    Column("layers of each", "partition"),
    Column("slowest stage / mean", "imbalance", ".2f"),
    Column("predicted: ms", "predicted_ms", ".0f"),
    Column("predicted: times as fast", "predicted_gain", ".2f"),
    Column("measured: ms", "measured_ms", ".0f"),
    Column("measured: times as fast", "measured_gain", ".2f"),
)


@dataclass(frozen=True, slots=True)
class Work:
    """The model as layers, and one mini-batch."""

    name: str
    layers: Layers
    images: Tensor
    labels: Tensor
    num_microbatches: int

    def pipeline(self, partition: Sequence[int], **options: Any) -> Pipeline:
        """Cut the layers as asked."""
        return Pipeline(
            self.layers,
            partition=partition,
            num_microbatches=self.num_microbatches,
            schedule="gpipe",
            loss=loss,
            threads_per_stage=1,
            **options,
        )

    def balanced(self, num_stages: int) -> tuple[int, ...]:
        """Give the partition that a pipeline finds for itself, by measured time."""
        with Pipeline(
            self.layers,
            num_stages,
            num_microbatches=self.num_microbatches,
            schedule="gpipe",
            loss=loss,
            threads_per_stage=1,
            example_inputs=self.images,
        ) as pipe:
            return pipe.partition

    def equal(self, num_stages: int) -> tuple[int, ...]:
        """Give as many layers to each stage; the first ones have one more where they must."""
        least, more = divmod(len(self.layers), num_stages)
        return tuple(least + (stage < more) for stage in range(num_stages))


def loss(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Weigh the auxiliary head's loss as Real et al. do."""
    main, auxiliary = (cross_entropy(output, labels) for output in outputs)
    return main + AUXILIARY_WEIGHT * auxiliary


def timed_step(work: Work, pipe: Pipeline) -> float:
    """Give the seconds of one step."""
    pipe.zero_grad()
    start_s = perf_counter()
    pipe.train_step(work.images, work.labels)
    return perf_counter() - start_s


@dataclass(frozen=True, slots=True)
class Profile:
    """The seconds of each layer, for one micro-batch, by kind of instruction."""

    forward_s: tuple[float, ...]
    recompute_s: tuple[float, ...]
    backward_s: tuple[float, ...]

    def costs(self, partition: Sequence[int]) -> Costs:
        """Add up the layers of each stage."""
        ends = list(accumulate(partition))
        spans = list(zip([0, *ends], ends, strict=False))
        of_stages = [
            tuple(sum(of_layers[start:end]) for start, end in spans)
            for of_layers in (self.forward_s, self.recompute_s, self.backward_s)
        ]
        forward_s, recompute_s, backward_s = of_stages
        return Costs(forward_s=forward_s, recompute_s=recompute_s, backward_s=backward_s)

    def whole(self) -> tuple[float, ...]:
        """Give the seconds of each layer."""
        kinds = zip(self.forward_s, self.recompute_s, self.backward_s, strict=True)
        return tuple(map(sum, kinds))

    def imbalance(self, partition: Sequence[int]) -> float:
        """Give the time of the slowest stage, in those of the mean one."""
        costs = [sum(self.whole()[end - n : end]) for n, end in _ends(partition)]
        return max(costs) / fmean(costs)

    def step_s(self, work: Work, partition: Sequence[int]) -> float:
        """Predict a step: a core for each stage, and messages that take no time."""
        with work.pipeline(partition) as pipe:
            return simulate(pipe.schedule_for(), self.costs(partition)).end_s


def _ends(partition: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(partition, accumulate(partition), strict=True)


def profile(work: Work, rounds: int) -> Profile:
    """Time each layer alone: every layer is a stage, and all take turns in one thread."""
    num_layers = len(work.layers)
    found: dict[tuple[type, int], list[float]] = defaultdict(list)
    with work.pipeline([1] * num_layers, transport=Transport.LOOPBACK, trace=True) as pipe:
        timed_step(work, pipe)  # warms up
        for _ in range(rounds):
            timed_step(work, pipe)
            for kind, layer, seconds in _seconds(pipe):
                found[kind, layer].append(seconds)
    forward_s, recompute_s, backward_s = (
        tuple(median(found[kind, layer]) for layer in range(num_layers)) for kind in KINDS
    )
    return Profile(forward_s, recompute_s, backward_s)


def _seconds(pipe: Pipeline) -> Iterator[tuple[type, int, float]]:
    """Give kind, stage and time of what the last step computed."""
    timeline = pipe.last_timeline
    assert timeline is not None
    for span in timeline.spans:
        match span.instruction:
            case Forward(stage) | Recompute(stage) | Backward(stage):
                yield type(span.instruction), stage, span.duration_s
            case _:
                pass


def make_work(options: argparse.Namespace) -> Work:
    """Build the model and draw the images."""
    torch.manual_seed(0)
    num_layers, num_filters = (3, 16) if options.smallest else (options.layers, options.filters)
    pixels = 32 if options.smallest else options.pixels
    model = amoebanet_d(
        num_layers, num_filters, num_classes=NUM_CLASSES, image_size=pixels, drop_path=0.0
    )
    num_microbatches = 2 if options.smallest else options.num_microbatches
    num_images = num_microbatches * (2 if options.smallest else options.images)
    images = torch.randn(num_images, 3, pixels, pixels)
    labels = torch.randint(NUM_CLASSES, (num_images,))
    layers = capture(model, images[:2], check=False)
    name = f"AmoebaNet-D ({num_layers}, {num_filters}), {pixels} pixels"
    return Work(name, layers, images, labels, num_microbatches)


def measure(work: Work, of_layers: Profile, num_stages: int, rounds: int) -> list[dict[str, Any]]:
    """Predict the partitions, and time them where each stage has a core."""
    partitions = {
        EQUAL: work.equal(num_stages),
        "balanced by the profile": balance(of_layers.whole(), num_stages),
        "balanced by Pipeline": work.balanced(num_stages),
    }
    rows: list[dict[str, Any]] = [
        {
            "num_stages": num_stages,
            "name": name,
            "partition": ", ".join(map(str, partition)),
            "imbalance": of_layers.imbalance(partition),
            "predicted_ms": of_layers.step_s(work, partition) * 1e3,
        }
        for name, partition in partitions.items()
    ]
    equal = rows[0]
    for row in rows:
        row["predicted_gain"] = equal["predicted_ms"] / row["predicted_ms"]
    if num_stages <= num_cores():
        pipes = [work.pipeline(partition) for partition in partitions.values()]
        times_s = interleaved([partial(timed_step, work, pipe) for pipe in pipes], rounds)
        for pipe, row, of_rounds in zip(pipes, rows, times_s, strict=True):
            pipe.close()
            row |= {"measured_ms": median(of_rounds) * 1e3, "rounds_s": of_rounds}
            ratios = [e / own for e, own in zip(times_s[0], of_rounds, strict=True)]
            row["measured_gain"] = median(ratios)
    return rows


def run(options: argparse.Namespace) -> Report:
    """Profile the layers, then compare the partitions for each number of stages."""
    load = Load.now()
    torch.set_num_threads(1)
    rounds = 1 if options.smallest else options.rounds
    work = make_work(options)
    progress(f"profile of {len(work.layers)} layers")
    of_layers = profile(work, rounds)
    rows: list[dict[str, Any]] = []
    for num_stages in (2, 4) if options.smallest else options.num_stages:
        progress(f"K = {num_stages}")
        rows += measure(work, of_layers, num_stages, rounds)
    names = [step.name for step in work.layers]
    for row in rows:
        row["layers"] = names
        row["layers_ms"] = [seconds * 1e3 for seconds in of_layers.whole()]
    settings = {
        "model": work.name,
        "layers to cut between": len(names),
        "M": work.num_microbatches,
        "images": len(work.images),
        "rounds": rounds,
        "load before": f"{load.before:.2f}",
    }
    return Report(COLUMNS, tuple(rows), settings, (*verdicts(rows), *load.notes))


def verdicts(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Say what balancing brings, predicted and measured."""
    for row in rows:
        if row["name"] == EQUAL:
            continue
        found = f"predicted {row['predicted_gain']:.2f}"
        found += f", measured {row['measured_gain']:.2f}" if "measured_gain" in row else ""
        yield f"K = {row['num_stages']}, {row['name']}: {found} times as fast as equal stages."


def draw(report: Report, figure: "Figure") -> None:
    """Draw the time of each layer, and where the partitions for the fewest stages cut."""
    axes = figure.subplots()
    first = report.rows[0]
    axes.bar(first["layers"], first["layers_ms"], color="lightgrey")
    rows = [row for row in report.rows if row["num_stages"] == first["num_stages"]]
    for place, row in enumerate(rows):
        ends = list(accumulate(map(int, row["partition"].split(", "))))[:-1]
        label = f"cut into {row['num_stages']} stages: {row['name']}"
        for number, end in enumerate(ends):
            at = end - 0.5 + 0.08 * (place - 1)
            axes.axvline(at, color=f"C{place}", label=None if number else label)
    axes.set_ylabel("forward, recompute and backward\nof a micro-batch, ms")
    axes.tick_params(axis="x", rotation=30)
    axes.legend(loc="lower left", fontsize=8)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--layers", type=int, default=6, help="L of AmoebaNet-D (L, D)")
    options.add_argument("--filters", type=int, default=64, help="D of AmoebaNet-D (L, D)")
    options.add_argument("--pixels", type=int, default=64, help="of each side of an image")
    options.add_argument("--num-microbatches", type=int, default=8, metavar="M")
    options.add_argument("--images", type=int, default=8, help="of a micro-batch")
    options.add_argument("--num-stages", type=counts, default=(2, 4, 8), metavar="K,K,...")
    options.add_argument("--rounds", type=int, default=15, help="after one of warm-up")
    chosen = options.parse_args(arguments)
    report = run(chosen)
    publish(report, chosen, Path(__file__).parent, partial(draw, report))


if __name__ == "__main__":
    main()
