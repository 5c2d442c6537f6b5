"""Write the summary, the traced timeline and the report of a run when it ends."""

import json
from dataclasses import asdict
from itertools import islice

from penstock import Timeline
from penstock.trace import to_chrome
from penstock.trace.page import write_page
from penstock_recipes.errors import RunFolderError

from .loop import Trainer
from .run_files import MEMORY, REPORT, STEP, SUMMARY, TIMELINE
from .run_folder import RunFolder
from .run_page import page_of
from .scalars import StageMemory, Summary


def summarise(trainer: Trainer, folder: RunFolder, seconds: float) -> Summary:
    """Collect the results of a run; `seconds` is the training time of this process."""
    meter, names = trainer.meter, iter(trainer.layer_names)
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
