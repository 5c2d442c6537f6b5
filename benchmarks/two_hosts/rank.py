"""What runs on each of the two hosts: one stage of one pipeline, under every setting in turn.

python -m benchmarks.two_hosts.rank PLAN.json RESULT.json
"""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import mse_loss

from benchmarks.blocks import transformer
from benchmarks.two_hosts.hosts import sent_bytes
from penstock import Mesh, Pipeline, init_mesh, schedules
from penstock.doctor.findings import measure_edges

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """`num_blocks` transformer blocks on a batch of sequences, and how many steps are measured."""

    num_blocks: int = 2
    dim: int = 256
    num_heads: int = 4
    batch: int = 32
    tokens: int = 128
    steps: int = 5

    def message_bytes(self, num_microbatches: int) -> float:
        """Give the bytes of one micro-batch's activations, or gradients: float32."""
        return self.batch / num_microbatches * self.tokens * self.dim * 4


def measure(mesh: Mesh, work: Work, schedule: str, num_microbatches: int) -> dict[str, Any]:
    """Run a step to warm up, then those that count."""
    pipe = Pipeline(
        transformer(work.num_blocks, work.dim, work.num_heads),
        mesh=mesh,
        partition=[work.num_blocks // 2] * 2,
        num_microbatches=num_microbatches,
        loss=mse_loss,
        schedule=getattr(schedules, schedule),
        threads_per_stage=1,
        trace=True,
    )
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(2, work.batch, work.tokens, work.dim, generator=generator)
    pipe.train_step(inputs, targets)
    steps = []
    before = sent_bytes()
    for _ in range(work.steps):
        pipe.zero_grad()
        mesh.world.barrier("for the other host to begin a step")
        start_s = time.perf_counter()
        pipe.train_step(inputs, targets)
        step_s = time.perf_counter() - start_s
        assert pipe.last_timeline is not None
        (times,) = (t for t in pipe.last_timeline.breakdown().stages if t.stage == mesh.stage)
        computed = {n: getattr(times, n) for n in ("forward_s", "recompute_s", "backward_s")}
        steps.append({"step_s": step_s, "computed": computed})
    sent = (sent_bytes() - before) / work.steps
    program = str(pipe.schedule_for(num_microbatches))
    pipe.close()
    return {"steps": steps, "sent_bytes": sent, "schedule": program}


def run(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the link by itself, then a pipeline over it, for each schedule and M of the plan."""
    torch.set_num_threads(1)
    work = Work(**plan["work"])
    with init_mesh(num_stages=2, timeout_s=TIMEOUT_S, device="cpu") as mesh:
        edges = [asdict(edge) for edge in measure_edges(mesh)]
        runs = [measure(mesh, work, *setting) for setting in plan["settings"]]
    return {"edges": edges, "runs": runs}


if __name__ == "__main__":
    _, plan_path, result_path = map(Path, sys.argv)
    result_path.write_text(json.dumps(run(json.loads(plan_path.read_text()))))
