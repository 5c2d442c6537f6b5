"""Write the summary, the traced timeline and the report of a run when it ends."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice

import torch

from penstock import Cluster, Timeline
from penstock.errors import PenstockError
from penstock.mesh import num_processes
from penstock.trace import to_chrome
from penstock.trace.page import write_page
from penstock_recipes.errors import RunFolderError

from .build import target_of
from .loop import Trainer
from .run_files import MEMORY, REPORT, STEP, SUMMARY, TIMELINE
from .run_folder import RunFolder
from .run_page import page_of
from .scalars import DeviceMemory, StageMemory, Summary


def summarise(trainer: Trainer, folder: RunFolder, seconds: float) -> Summary:
    """Collect the results of a run; `seconds` is the training time of this process."""
    meter, names = trainer.meter, iter(trainer.layer_names)
    flops_per_s = flops_of_sample(trainer) * meter.samples_per_s if folder.writes else 0.0
    peak_flops_per_s = peak_of(trainer)
    return Summary(
        run_folder=str(folder.path),
        finished=trainer.finished,
        epochs=trainer.position.epoch,
        steps=trainer.position.step,
        scores=trainer.position.scores,
        shown={m.title: m.shown(trainer.position.scores) for m in trainer.task.measures},
        unit=trainer.task.unit,
        num_skipped=trainer.num_skipped,
        result=trainer.result,
        seconds=seconds,
        samples_per_s=meter.samples_per_s,
        bubble=meter.bubble,
        share_of_ideal=meter.share_of_ideal,
        stages=tuple(  # each process of a mesh knows the memory of its own stages
            StageMemory(
                stage=number,
                layers=tuple(islice(names, count)),
                peak_bytes=meter.peak_bytes.get(number),
            )
            for number, count in enumerate(trainer.pipe.partition)
        ),
        devices=memory_of(trainer.pipe.devices),
        flops_per_s=flops_per_s or None,
        mfu=flops_per_s / peak_flops_per_s if flops_per_s and peak_flops_per_s else None,
    )


def flops_of_sample(trainer: Trainer) -> float:
    """Count the FLOPs of a sample's forward and backward pass; 0 if they cannot be counted.

    They are those of `penstock profile`, for a micro-batch of the run.  A task that counts words
    has no fixed number of FLOPs for each.
    """
    if trainer.task.unit != "samples" or not trainer.meter.samples_per_s:
        return 0.0
    try:
        target = target_of(trainer.recipe, trainer.task, trainer.recipe.model.name)
        (size,) = target.profile(device=Cluster.load(_ANY_CLUSTER).device_of(0)).sizes
    except (PenstockError, RuntimeError):  # a report must not cost the run
        return 0.0
    flops = sum(
        operator.flops * operator.count
        for n in range(len(size.kind_of))
        for operator in size.layer(n).operators
    )
    return flops / size.microbatch_size


_ANY_CLUSTER = "dgx-h100"
"""Counting needs the type of a device, but FLOPs are the same on all."""
_PRESETS = {
    "NVIDIA B200": "dgx-b200",
    "NVIDIA H200": "hgx-h200",
    "NVIDIA H100 80GB HBM3": "dgx-h100",
    "NVIDIA A100-SXM4-80GB": "dgx-a100",
    "NVIDIA A100 80GB PCIe": "dgx-a100",
    "NVIDIA A100-SXM4-40GB": "dgx-a100-40",
    "NVIDIA A100-PCIE-40GB": "dgx-a100-40",
    "Tesla V100-SXM2-16GB": "p3.16xlarge",
    "Tesla V100-SXM2-32GB": "p3.16xlarge",
    "Tesla P100-PCIE-16GB": "p100-pcie-8",
    "Tesla P40": "p40-pcie-4",
}
"""The presets of clusters that have a device, by the name that CUDA reports."""


def peak_of(trainer: Trainer) -> float:
    """Return the peak FLOP/s of all devices of the run, in its precision; 0 if it is not known."""
    own = [device for device in set(trainer.pipe.devices) if device.type == "cuda"]
    presets = [_PRESETS.get(torch.cuda.get_device_name(device)) for device in own]
    peaks = [
        Cluster.load(name).device_of(0).flops_per_s.get(trainer.recipe.train.precision, 0.0)
        for name in presets
        if name is not None
    ]
    if len(peaks) < len(own) or not all(peaks):
        return 0.0
    return sum(peaks) * num_processes()  # each process has the same number of devices


def memory_of(devices: Iterable[torch.device]) -> tuple[DeviceMemory, ...]:
    """Read the peak memory of accelerators, once for each."""
    return tuple(
        DeviceMemory(
            device=f"{device} ({torch.cuda.get_device_name(device)})",
            allocated_bytes=torch.cuda.max_memory_allocated(device),
            reserved_bytes=torch.cuda.max_memory_reserved(device),
            total_bytes=torch.cuda.get_device_properties(device).total_memory,
        )
        for device in dict.fromkeys(devices)
        if device.type == "cuda"
    )


def write_timeline(folder: RunFolder, timeline: Timeline) -> str:
    """Write the timeline as JSON and as a Chrome trace; return a warning if that fails."""
    if not folder.writes:
        return ""
    try:
        folder.write_text(TIMELINE, timeline.to_json())
        folder.write_text("timeline.chrome.json", to_chrome(timeline))
    except (RunFolderError, OSError) as error:
        return f"not all of the timeline is kept: {error}"
    return ""


def write_report(trainer: Trainer, folder: RunFolder, summary: Summary) -> str:
    """Write the report and its data; return a warning if that fails."""
    if not folder.writes:
        return ""
    meter = trainer.meter
    try:
        folder.write_text(SUMMARY, json.dumps(asdict(summary)) + "\n")
        if meter.memory is not None:
            folder.write_text(MEMORY, meter.memory.to_json())
        if meter.timeline is not None:
            seconds = {"step_s": meter.step_s, "optimizer_s": meter.optimizer_s}
            folder.write_text(STEP, json.dumps(seconds) + "\n")
        write_page(page_of(folder.path), folder.path / REPORT)
    except Exception as error:  # the run is done and kept; its report must not lose it
        return f"no report is written: {error}"
    return ""
