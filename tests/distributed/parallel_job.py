"""Plan a model in one line and train it: called in each process, or alone.

    python -m tests.distributed.parallel_job FOLDER HOSTS OPTIONS.json

`hosts` are the numbers of devices of hosts, as 1,2.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import penstock
from penstock.automatic.choose import MeshTask
from penstock.automatic.prices import WAYS, Way
from tests.few_devices import cluster
from tests.sharding.test_pipeline import WORDS, loss, made


def cluster_of(*hosts: int) -> penstock.Cluster:
    """Describe hosts with so many slow cores, far from those of other hosts."""
    peaks = {"float32": 1e9, "float64": 1e9}
    return cluster(*hosts, far=1e7, flops_per_s=peaks, bytes_per_s=1e9, torch_type="cpu")


def train(pipe: penstock.Pipeline) -> dict[str, Any]:
    """Train two steps; return all that there is to compare."""
    optimizer = torch.optim.AdamW([{"params": list(pipe.parameters())}], lr=0.01)
    found: dict[str, Any] = {"losses": []}
    for _ in range(2):
        found["losses"].append(pipe.train_step(WORDS, WORDS))
        gradients = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
        found["gradients"] = {n: g.clone() for n, g in pipe.shards.whole(gradients).items()}
        optimizer.step()
        optimizer.zero_grad()
    return found | {"plan": pipe.plan.to_json(), "text": str(pipe.plan)}


def main() -> None:
    """Do what is asked for."""
    folder, hosts, options = Path(sys.argv[1]), map(int, sys.argv[2].split(",")), sys.argv[3]
    torch.set_num_threads(1)
    given, parallel = json.loads(options), partial(penstock.parallelize, made(0), WORDS)
    task = partial(MeshTask, ways=[Way(*own) for own in given.pop("ways", WAYS)])
    with patch("penstock.automatic.parallelize.MeshTask", task):
        pipe = parallel(loss=loss, cluster=cluster_of(*hosts), seed=3, **given)
    torch.save(train(pipe), folder / f"{pipe.mesh.rank}.pt")


if __name__ == "__main__":
    main()
