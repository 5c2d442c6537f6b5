"""Train in two shards that compute on one device, over gloo: NCCL refuses to share a GPU.

python tests/gpu/shards_job.py FOLDER DEVICE
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import penstock
from penstock.runtime.pipeline_module import parts_of
from tests.gpu.models import Subject, language

PLANS = ("megatron", "zero1", "zero3", "context")
"""Ready plans that are run."""
WAYS = [(sharding, dropout) for sharding in PLANS for dropout in (0, 0.1)]
"""How operators are divided, and what dropout drops."""


def train(subject: Subject, **options: Any) -> dict[str, Any]:
    """Take two steps; return what there is to compare."""
    options |= {"num_microbatches": 2, "loss": subject.loss, "seed": 3}
    pipe = penstock.Pipeline(subject.model, example_inputs=subject.inputs, **options)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    found: dict[str, Any] = {}
    for step in range(2):
        found[f"loss {step}"] = pipe.train_step(subject.inputs, subject.targets)
        named = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
        found |= {f"{n} {step}": g.clone() for n, g in parts_of(pipe).shards.whole(named).items()}
        optimizer.step()
        optimizer.zero_grad()
    weights = {n: p.detach() for n, p in pipe.named_parameters()}
    found |= {n: w.clone() for n, w in parts_of(pipe).shards.whole(weights).items()}
    pipe.close()
    return found


def main() -> None:
    """Leave what this process found in a file."""
    folder, device = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:gloo")
    with penstock.init_mesh(1, num_shards=2, device=device, timeout_s=60.0) as mesh:
        found = [
            train(language(device, dropout), mesh=mesh, sharding=sharding)
            for sharding, dropout in WAYS
        ]
        torch.save(found, folder / f"{mesh.rank}.pt")


if __name__ == "__main__":
    main()
