"""Plan a model in one line and train it: called in each process, or alone.

    python -m tests.distributed.parallel_job FOLDER HOSTS OPTIONS.json

`hosts` are the numbers of devices of hosts, as 1,2; the option `model` is a name in `MODELS`.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError
from penstock.planner.mesh_task import MeshTask
from penstock.planner.submeshes import MEMORY_POLICIES, MemoryPolicy
from penstock.runtime.pipeline_module import parts_of
from tests.few_devices import cluster
from tests.sharding.test_pipeline import WORDS, loss, made


class Attributes(nn.Module):
    """A model without lists: its layers are attributes, with functions between them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 16)
        for number in range(20):
            setattr(self, f"linear{number}", nn.Linear(16, 16))
        self.head = nn.Linear(16, 32)

    def forward(self, words: Tensor) -> Tensor:
        values = self.words(words)
        for number in range(20):
            layer: nn.Module = getattr(self, f"linear{number}")
            values = values + nn.functional.gelu(layer(values))
        output: Tensor = self.head(values)
        return output


def attributes(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Attributes().double()


MODELS = {"gpt": made, "attributes": attributes}


def cluster_of(*hosts: int) -> penstock.Cluster:
    peaks = {"float32": 1e9, "float64": 1e9}
    return cluster(*hosts, far=1e7, flops_per_s=peaks, bytes_per_s=1e9, torch_type="cpu")


def train(pipe: penstock.Pipeline) -> dict[str, Any]:
    optimizer = torch.optim.AdamW([{"params": list(pipe.parameters())}], lr=0.01)
    found: dict[str, Any] = {"losses": []}
    for _ in range(2):
        found["losses"].append(pipe.train_step(WORDS, WORDS))
        gradients = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
        whole = parts_of(pipe).shards.whole(gradients)
        found["gradients"] = {n: g.clone() for n, g in whole.items()}
        optimizer.step()
        optimizer.zero_grad()
    return found | {"plan": pipe.plan.to_json(), "text": str(pipe.plan)}


def only_meshes(*_: Any, **__: Any) -> NoReturn:
    """Leave plans out whose stages have one device each."""
    raise ConfigError("only plans on meshes are compared")


def main() -> None:
    folder, hosts, options = Path(sys.argv[1]), map(int, sys.argv[2].split(",")), sys.argv[3]
    torch.set_num_threads(1)
    given = json.loads(options)
    model = MODELS[given.pop("model", "gpt")](0)
    given.setdefault("measure", False)  # plans are then the same on every machine
    named = [MemoryPolicy(penstock.Recompute(word)) for word in given.pop("policies", ())]
    policies = named or MEMORY_POLICIES
    task_of = MeshTask.of
    inputs = WORDS
    if "parallelism" in given:
        given["parallelism"] = penstock.Parallelism(**given["parallelism"])
        inputs = WORDS[:4]  # which divide; it trains with five samples
    with (
        patch.object(MeshTask, "of", lambda *at: replace(task_of(*at), policies=policies)),
        patch("penstock.planner.make_plan.find_plans", only_meshes),
    ):
        pipe = penstock.parallelize(
            model, inputs, loss=loss, cluster=cluster_of(*hosts), seed=3, **given
        )
    torch.save(train(pipe), folder / f"{pipe.mesh.rank}.pt")


if __name__ == "__main__":
    main()
