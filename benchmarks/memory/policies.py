"""Measure each way to keep less: the bytes that a middle stage keeps, and a step's seconds.

python -m benchmarks.memory.policies
"""

import statistics
import tempfile
import time
from typing import Any

import torch
from torch.nn.functional import mse_loss

from benchmarks.blocks import transformer
from penstock import Pipeline, Recompute, Trace, Transport, schedules

NUM_STAGES, NUM_MICROBATCHES, STEPS = 4, 16, 5
POLICIES: dict[str, dict[str, Any]] = {
    "keep everything": {"recompute": Recompute.NEVER},
    "every second layer again": {"recompute": Recompute.layers(*range(0, 16, 2))},
    "every layer again": {"recompute": Recompute.layers(*range(16))},
    "the stage again": {"recompute": Recompute.STAGE},
    "moved to files": {"recompute": Recompute.NEVER, "offload": True},
    "the stage again, its inputs in files": {"recompute": Recompute.STAGE, "offload": True},
}


def measured(schedule: schedules.Family, **policy: Any) -> tuple[int, float]:
    """Return the most that stage 1 keeps, in bytes, and the median seconds of a step."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        pipe = Pipeline(
            transformer(16, 128, 4),
            partition=[4] * NUM_STAGES,
            num_microbatches=NUM_MICROBATCHES,
            loss=mse_loss,
            schedule=schedule,
            transport=Transport.LOOPBACK,
            offload_folder=folder,
            threads_per_stage=1,
            **policy,
        )
        x = torch.randn(4 * NUM_MICROBATCHES, 64, 128)
        times_s = []
        for step in range(STEPS + 1):
            pipe.trace = Trace.MEMORY if step == STEPS else Trace.OFF
            start_s = time.perf_counter()
            pipe.train_step(x, x)
            times_s.append(time.perf_counter() - start_s)
        timeline = pipe.last_timeline
    assert timeline is not None
    return timeline.peak_bytes()[1], statistics.median(times_s[1:STEPS])


def main() -> None:
    """Print the table."""
    print("| | GPipe: MiB | seconds | 1F1B: MiB | seconds |\n|---|---|---|---|---|")
    for name, policy in POLICIES.items():
        cells = []
        for schedule in (schedules.gpipe, schedules.one_f_one_b):
            kept, step_s = measured(schedule, **policy)
            cells += [f"{kept / 2**20:.1f}", f"{step_s:.2f}"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
