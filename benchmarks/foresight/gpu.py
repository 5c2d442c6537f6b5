"""One GPU: is what a training step takes and holds there predicted, from a preset too?

    preset        figures of this kind of GPU, written down long before   ─┐
    calibrated    its copies, products and issuing, measured here          ├─►  a step, its peak
    layers        each layer alone, measured here                         ─┘

python -m benchmarks.foresight.gpu --update-readme
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import penstock
from benchmarks.alpa_paper.gshard import gshard_moe
from benchmarks.alpa_paper.wide_resnet import WideResNetSize, wide_resnet
from benchmarks.foresight.main import calibrated
from benchmarks.foresight.subjects import next_words
from benchmarks.report import Column, Load, Report, parser, progress, publish
from penstock import Cluster, Plan, Profile, Recompute
from penstock.costs.cluster import Host
from penstock.costs.cluster.files import preset_of
from penstock.planner.placement import Placement
from penstock.planner.predict import Prediction
from penstock.schedules import gpipe
from penstock_recipes.zoo import gpt

NUM_WARM_UPS, NUM_STEPS = 3, 10
MIB = 1 << 20
BALANCE = 0.01
WAYS = {"preset": "by preset", "calibrated": "by calibration", "layers": "layers measured"}
COLUMNS = (
    Column("model", "name"),
    Column("type", "dtype"),
    Column("samples", "batch"),
    Column("measured: ms", "measured_ms", ".1f"),
    *(
        column
        for way, title in zip(
            WAYS, ("by preset", "by calibration", "layers measured"), strict=True
        )
        for column in (
            Column(f"{title}: ms", f"{way}_ms", ".1f"),
            Column("off by", f"{way}_off", "+.1%"),
        )
    ),
    Column("predicted peak: MiB", "predicted_mib", ",.0f"),
    Column("measured peak: MiB", "measured_mib", ",.0f"),
    Column("off by", "mib_off", "+.1%"),
)
Row = dict[str, Any]


def with_balance(outputs: tuple[Tensor, Tensor], words: Tensor) -> Tensor:
    """Return the loss of a language model with experts."""
    logits, balance = outputs
    return next_words(logits, words) + BALANCE * balance


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model whose numbers have a type, and the batch of its step.

    `side` are pixels of a side, or words of a text, of which there are `num_words` different ones.
    """

    name: str
    make: Callable[..., nn.Module]
    sizes: dict[str, Any] = field(default_factory=dict)
    batch: int
    side: int
    num_words: int = 0
    dtype: torch.dtype = torch.float32
    loss: Callable[[Any, Tensor], Tensor] = next_words

    def made(self, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
        """Build the model, its inputs and their targets there; equal at every call."""
        torch.manual_seed(0)
        with device:
            model = self.make(**self.sizes).to(self.dtype)
            if self.num_words:
                words = torch.randint(self.num_words, (self.batch, self.side))
                return model, words, words.roll(-1, 1)
            images = torch.randn(self.batch, 3, self.side, self.side, dtype=self.dtype)
            return model, images, torch.randint(10, (self.batch,))


def _texts(make: Callable[..., nn.Module], batch: int, side: int, **sizes: Any) -> Subject:
    is_gpt = make is gpt
    return Subject(
        name="GPT" if is_gpt else "GShard MoE",
        make=make,
        sizes={**sizes, "max_length": side, "dropout": 0.0},
        batch=batch,
        side=side,
        num_words=sizes["num_words"],
        loss=next_words if is_gpt else with_balance,
    )


def _images(batch: int, side: int, **sizes: Any) -> Subject:
    return Subject(
        name="Wide-ResNet",
        make=wide_resnet,
        sizes=sizes,
        batch=batch,
        side=side,
        loss=cross_entropy,
    )


_GPT = {"num_layers": 12, "width": 1024, "num_heads": 16, "num_words": 32_000}
_EXPERTS = {"num_layers": 8, "width": 768, "num_heads": 12, "num_words": 32_000, "num_experts": 8}
_SMALL = {"num_layers": 2, "width": 8, "num_heads": 2, "num_words": 16}
SUBJECTS = (
    _texts(gpt, 4, 1024, **_GPT),
    replace(_texts(gpt, 8, 1024, **_GPT), dtype=torch.bfloat16),
    _images(16, 224),
    _texts(gshard_moe, 4, 512, **_EXPERTS),
)
SMALLEST = (
    _texts(gpt, 2, 8, **_SMALL),
    _images(2, 32, size=WideResNetSize(50, 4, 1), num_classes=10),
    _texts(gshard_moe, 2, 8, **_SMALL, num_experts=2),
)


def clusters(device: torch.device, *, smallest: bool) -> dict[str, Cluster | None]:
    """Describe this device in each way; layers are measured, and the rest is as calibrated."""
    found = calibrated(smallest=smallest)
    ways: dict[str, Cluster | None] = {"preset": None, "calibrated": found, "layers": found}
    if device.type != "cuda":
        return ways
    known = torch.cuda.get_device_properties(device)
    if (preset := preset_of(known.name, known.total_memory)) is None:
        return ways
    host = Host(name="host", devices=("gpu",))
    written = Cluster(name=preset.name, devices={"gpu": preset}, hosts=(host,), links={})
    return {**ways, "preset": written}


def whole(profile: Profile, subject: Subject, device: torch.device) -> Plan:
    """Plan a model as one stage of one micro-batch, of which all is kept."""
    return Plan(
        layers=profile.layers,
        partition=(len(profile.layers),),
        schedule=gpipe,
        num_microbatches=1,
        recompute=(Recompute.NEVER,),
        placement=Placement.of(range(1), devices=(str(device),)),
        batch_size=subject.batch,
    )


def measure(subject: Subject, device: torch.device, ways: dict[str, Cluster | None]) -> Row:
    """Predict a step in each way, and run it."""
    progress(f"{subject.name}, {subject.dtype}")
    _free()
    before_bytes = _allocated(device)
    model, inputs, targets = subject.made(device)
    layers = penstock.capture(model, inputs)
    profile = penstock.profile(
        layers,
        inputs,
        loss=subject.loss,
        targets=targets,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),  # keeps nothing
    )
    plan, counted = whole(profile, subject, device), replace(profile, measured_on=None)
    told = {
        way: Prediction(plan, profile if way == "layers" else counted, cluster)
        for way, cluster in ways.items()
        if cluster is not None
    }
    with penstock.Pipeline(layers, plan=plan, loss=subject.loss, example_inputs=inputs) as pipe:
        found_s, most_bytes = _run(pipe, inputs, targets, device)
        pipe.trace = penstock.Trace.MEMORY
        pipe.zero_grad()
        pipe.train_step(inputs, targets)
        traced = pipe.last_timeline
    measured_s, seconds = median(found_s), {way: own.timeline.step_s for way, own in told.items()}
    (peak_bytes,) = told["layers"].timeline.peak_bytes_of_ranks()
    peak = {"predicted_mib": peak_bytes / MIB}
    if most_bytes:
        most_bytes -= before_bytes
        peak |= {"measured_mib": most_bytes / MIB, "mib_off": peak_bytes / most_bytes - 1}
    return {
        "name": subject.name,
        "dtype": str(subject.dtype).removeprefix("torch."),
        "batch": subject.batch,
        "measured_ms": measured_s * 1e3,
        **{f"{way}_ms": own * 1e3 for way, own in seconds.items()},
        **{f"{way}_off": own / measured_s - 1 for way, own in seconds.items()},
        **peak,
        "mib_by_kind": {
            title: {
                kind.value: round(most / MIB, 1)
                for kind, (most,) in timeline.peak_bytes_by_kind().items()
            }
            for title, timeline in (("predicted", told["layers"].timeline), ("measured", traced))
            if timeline is not None
        },
        "seconds": found_s,
        "layers": [kind.seconds and kind.seconds.forward_s for kind in profile.sizes[0].kinds],
    }


def _run(
    pipe: penstock.Pipeline, inputs: Tensor, targets: Tensor, device: torch.device
) -> tuple[list[float], int]:
    """Return the seconds of each step, and the most bytes that a device's memory held in them."""
    found = []
    for step in range(NUM_WARM_UPS + NUM_STEPS):
        if step == NUM_WARM_UPS and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        _wait(device)
        start_s = time.perf_counter()
        pipe.zero_grad()
        pipe.train_step(inputs, targets)
        _wait(device)
        found.append(time.perf_counter() - start_s)
    most = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return found[NUM_WARM_UPS:], most


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """Yield lines that sum up."""
    for way in (*WAYS, "mib"):
        off = [abs(row[f"{way}_off"]) for row in rows if f"{way}_off" in row]
        what = "peak of memory" if way == "mib" else f"step time, {way}"
        if off:
            yield f"- {what}: median error {median(off):.1%}, worst {max(off):.1%}"


def run(options: argparse.Namespace) -> Report:
    """Calibrate, profile, predict and measure."""
    load = Load.now()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        torch.backends.cudnn.allow_tf32 = False  # float32 is what presets price
    ways = clusters(device, smallest=options.smallest)
    subjects = SMALLEST if options.smallest else SUBJECTS
    rows = [measure(subject, device, ways) for subject in subjects]
    written = ways["preset"]
    settings = {
        "smallest setting": options.smallest,
        "preset": written.name if written else "none",
        "steps": NUM_STEPS,
        "load before": f"{load.before:.2f}",
    }
    return Report(COLUMNS, tuple(rows), settings, (*verdicts(rows), *load.notes))


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    chosen = options.parse_args(arguments)
    if not chosen.smallest and not torch.cuda.is_available():
        options.error("this torch sees no GPU; --smallest shows on the CPU that it runs")
    publish(run(chosen), chosen, Path(__file__).parent, part="gpu")


if __name__ == "__main__":
    main()
