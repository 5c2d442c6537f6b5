"""The bytes each stage keeps for its backward passes, beside the paper's formula."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.blocks import conv_net, transformer
from benchmarks.report import Column, Report, counts, parser, progress, publish
from penstock import Pipeline, Recompute, Trace, schedules

KIB = 1024

COLUMNS = (
    Column("model", "model"),
    Column("schedule", "schedule"),
    Column("K", "num_stages"),
    Column("M", "num_microbatches"),
    Column("never: KiB", "never_kib", ",.0f"),
    Column("formula", "never_formula_kib", ",.0f"),
    Column("recompute: KiB", "stage_kib", ",.0f"),
    Column("formula", "stage_formula_kib", ",.0f"),
    Column("all stages as predicted", "verdict"),
    Column("saved", "saved", ".0%"),
)
GPU_COLUMNS = (
    Column("never: allocator KiB", "never_gpu_kib", ",.0f"),
    Column("recompute: allocator KiB", "stage_gpu_kib", ",.0f"),
)


@dataclass(frozen=True, slots=True)
class Subject:
    """A chain of equal layers and the shape of one sample of its input."""

    name: str
    build: Callable[[], nn.Sequential]
    sample: tuple[int, ...]


SUBJECTS = (
    Subject("8 transformer blocks, d = 64, 32 tokens", lambda: transformer(8, 64, 4), (32, 64)),
    Subject("conv net, 8 layers, 16 channels, 16 x 16", lambda: conv_net(8, 16), (3, 16, 16)),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One pipeline to measure."""

    subject: Subject
    schedule: schedules.Family
    num_stages: int
    num_microbatches: int
    batch: int
    device: torch.device

    def pipeline(self, recompute: Recompute, num_microbatches: int) -> Pipeline:
        """Build the pipeline, its layers cut into equal stages."""
        layers = self.subject.build()
        return Pipeline(
            layers,
            partition=[len(layers) // self.num_stages] * self.num_stages,
            num_microbatches=num_microbatches,
            loss=squares,
            schedule=self.schedule,
            recompute=recompute,
            devices=self.device,
            trace=Trace.MEMORY,
        )

    def inputs(self, num_samples: int) -> Tensor:
        """Draw a batch."""
        return torch.randn(num_samples, *self.subject.sample, device=self.device)


def squares(output: Tensor, _: None) -> Tensor:
    """A loss without targets: the mean of squares."""
    return mse_loss(output, torch.zeros_like(output))


def peak_bytes(setting: Setting, recompute: Recompute) -> tuple[dict[int, int], int]:
    """Run one step; give the most bytes each stage kept, and the GPU allocator's own peak."""
    inputs = setting.inputs(setting.batch)
    with setting.pipeline(recompute, setting.num_microbatches) as pipe:
        pipe.train_step(inputs)
        before = _reset_allocator(setting.device)
        pipe.train_step(inputs)
        assert pipe.last_timeline is not None
        return pipe.last_timeline.peak_bytes(), _allocator_peak(setting.device) - before


def _reset_allocator(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _allocator_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def one_microbatch(setting: Setting) -> tuple[list[int], list[int]]:
    """Run one micro-batch alone; give what each stage takes in and all that it keeps, in bytes."""
    inputs = setting.inputs(setting.batch // setting.num_microbatches)
    with setting.pipeline(Recompute.NEVER, 1) as pipe:
        pipe.train_step(inputs)  # the first step copies each input, to see who changes it in place
        pipe.train_step(inputs)
        assert pipe.last_timeline is not None
        kept = pipe.last_timeline.peak_bytes()
        stages = [nn.Sequential(*part) for part in _parts(list(pipe), pipe.partition)]
    taken_in, value = [], inputs
    with torch.no_grad():
        for stage in stages:
            taken_in.append(value.numel() * value.element_size())
            value = stage(value)
    return taken_in, [kept[s] for s in range(setting.num_stages)]


def _parts(layers: list[nn.Module], partition: tuple[int, ...]) -> list[list[nn.Module]]:
    ends = list(accumulate(partition))
    return [layers[end - count : end] for end, count in zip(ends, partition, strict=True)]


def in_flight(setting: Setting, stage: int) -> int:
    """Give how many micro-batches a stage holds at once: all, or with 1F1B at most K - s."""
    if setting.schedule is schedules.gpipe:
        return setting.num_microbatches
    return min(setting.num_microbatches, setting.num_stages - stage)


def formula(setting: Setting) -> tuple[list[int], list[int]]:
    """Evaluate the paper's formula for each stage, in bytes: without and with recompute.

    Without: everything, for each micro-batch in flight.  With: the inputs of each micro-batch in
    flight, O(N), and one micro-batch's activations, O(L/K * N/M) (section 2.3).
    """
    taken_in, kept = one_microbatch(setting)
    held = [in_flight(setting, stage) for stage in range(setting.num_stages)]
    never = [h * k for h, k in zip(held, kept, strict=True)]
    stage = [h * i + k - i for h, i, k in zip(held, taken_in, kept, strict=True)]
    return never, stage


def measure(setting: Setting) -> dict[str, Any]:
    """Measure one setting with and without recompute; its fullest stage stands in the table."""
    never, never_gpu = peak_bytes(setting, Recompute.NEVER)
    stage, stage_gpu = peak_bytes(setting, Recompute.STAGE)
    never_formula, stage_formula = formula(setting)
    order = range(setting.num_stages)
    equal = [never[s] for s in order] == never_formula
    equal = equal and [stage[s] for s in order] == stage_formula
    return {
        "model": setting.subject.name,
        "schedule": str(setting.schedule),
        "num_stages": setting.num_stages,
        "num_microbatches": setting.num_microbatches,
        "never_kib": max(never.values()) / KIB,
        "never_formula_kib": max(never_formula) / KIB,
        "stage_kib": max(stage.values()) / KIB,
        "stage_formula_kib": max(stage_formula) / KIB,
        "verdict": "yes" if equal else "no",
        "saved": 1 - max(stage.values()) / max(never.values()),
        "never_gpu_kib": never_gpu / KIB,
        "stage_gpu_kib": stage_gpu / KIB,
        "never_bytes_by_stage": [never[s] for s in order],
        "never_formula_bytes_by_stage": never_formula,
        "stage_bytes_by_stage": [stage[s] for s in order],
        "stage_formula_bytes_by_stage": stage_formula,
    }


def settings(options: argparse.Namespace) -> list[Setting]:
    """Give every combination that the options ask for."""
    device = torch.device(options.device)
    all_stages = (1, 2) if options.smallest else options.num_stages
    all_counts = (1, 2) if options.smallest else options.num_microbatches
    batch = 2 if options.smallest else options.batch
    return [
        Setting(subject, schedule, k, m, batch, device)
        for subject, schedule, k, m in product(
            SUBJECTS, [schedules.gpipe, schedules.one_f_one_b], all_stages, all_counts
        )
    ]


def run(options: argparse.Namespace) -> Report:
    """Measure every setting."""
    torch.manual_seed(0)
    rows = []
    for setting in settings(options):
        progress(f"{setting.subject.name}: K {setting.num_stages}, M {setting.num_microbatches}")
        rows.append(measure(setting))
    on_gpu = options.device.startswith("cuda")
    columns = COLUMNS + (GPU_COLUMNS if on_gpu else ())
    batch = 2 if options.smallest else options.batch
    return Report(columns, tuple(rows), {"batch": batch, "device": options.device})


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--num-stages", type=counts, default=(1, 2, 4), metavar="K,K,...")
    options.add_argument(
        "--num-microbatches", type=counts, default=(1, 2, 4, 8, 16), metavar="M,M,..."
    )
    options.add_argument("--batch", type=int, default=16, metavar="N", help="a multiple of M")
    options.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of all stages"
    )
    chosen = options.parse_args(arguments)
    publish(run(chosen), chosen, Path(__file__).parent)


if __name__ == "__main__":
    main()
