"""Steps of a pipeline in processes with a pretended GPU each, or on the CPU.

python -m tests.pretend_devices.processes_job FOLDER DEVICE STAGES REPLICAS SHARDS OPTION=VALUE ...

With FATAL=RANK in the environment that process ends in the forward of step 2, as if killed, or in
its second replay; the others leave what they raise.  With ASKS=RANK, the last layer of that
process asks the GPU for a number.
"""

import os
import sys
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

import penstock
from penstock.errors import PeerError

from .install import pretended_devices
from .ordered_group import ordered_groups

SAMPLES = (16, 16, 16, 24, 24)
"""Samples of each step: the third is as foreseen, and the fourth is not."""
SAMPLES_OF_GRAPHS = (16, 24, 16, 24, 16, 16, 16, 16, 24)
"""Those with CUDA graphs: the last four are replays, of two graphs."""

KEPT: list[penstock.Pipeline] = []
"""Pipelines that nobody closes."""


def train(**options: Any) -> dict[str, Any]:
    """Return the loss and the gradients of each step."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Tanh()) for _ in range(8)]
    if is_named("FATAL") and "graphs" not in options:
        blocks[-1].register_forward_hook(_Fatal())
    if is_named("ASKS"):
        blocks[-1].register_forward_hook(lambda layer, given, output: bool(output.sum()) and None)
    norms = [nn.BatchNorm1d(16)] if options.pop("norms", False) else []
    model: Any = nn.Sequential(*blocks, *norms, nn.Linear(16, 4))
    if options.pop("tied", False):
        blocks[-1][0].weight = blocks[0][0].weight
        model = penstock.capture(model, torch.zeros(2, 16))
    samples = SAMPLES_OF_GRAPHS if options.pop("graphs", False) else SAMPLES
    inputs = torch.randn(max(samples), 16)
    pipe = penstock.Pipeline(
        model, num_microbatches=4, loss=nn.functional.mse_loss, seed=1, **options
    )
    found: dict[str, Any] = {}
    for step, number in enumerate(samples):
        if step % 2 == 0 or options["mesh"].num_replicas == 1:  # else gradients add up
            pipe.zero_grad()
        loss = pipe.train_step(inputs[:number], inputs[:number, :4].clone())
        found |= {f"loss {step}": float(loss)}
        named = [(name, p.grad) for name, p in pipe.named_parameters() if p.grad is not None]
        found |= {f"{name} {step}": gradient.cpu().clone() for name, gradient in named}
    KEPT.append(pipe)
    return found


def is_named(variable: str) -> bool:
    """Tell whether a variable of the environment has the number of this process."""
    return os.environ.get(variable) == os.environ.get("RANK", "-")


class _Fatal:
    """Ends the process in the second step."""

    def __init__(self) -> None:
        self._num_calls = 0

    def __call__(self, *_: Any) -> None:
        self._num_calls += 1
        if self._num_calls == 6:
            os._exit(9)


def count_replays(graphs: WeakSet[Any]) -> list[None]:
    """Return a list that grows by an entry for each replay from now on; add all graphs."""
    graph, counted = torch.cuda.CUDAGraph, list[None]()
    replay = graph.replay

    def counting(self: Any) -> None:
        counted.append(None)
        graphs.add(self)
        if is_named("FATAL") and len(counted) == 2:
            os._exit(9)
        replay(self)

    graph.replay = counting  # type: ignore[method-assign]
    return counted


def main() -> None:
    """Leave what this process found, and the races, in a file."""
    folder, device, *numbers = sys.argv[1:6]
    options: dict[str, Any] = dict(text.split("=") for text in sys.argv[6:])
    stages, replicas, shards = map(int, numbers)
    if shards > 1:
        options["example_inputs"] = torch.randn(SAMPLES[0], 16)
    graphs = WeakSet[Any]()
    with (
        pretended_devices(1) as memory,
        ordered_groups(memory),
        penstock.init_mesh(stages, replicas, shards, device=device, timeout_s=60.0) as mesh,
    ):
        replays = count_replays(graphs)
        options["cuda_graphs"] = device != "cpu" and options.get("graphs", False)
        try:
            found = train(mesh=mesh, **options)
        except PeerError as error:
            found = {"error": str(error)}
        torch.save((found, memory.races, len(replays)), Path(folder) / f"{mesh.rank}.pt")
    assert not graphs, "a graph outlives its communicators"


if __name__ == "__main__":
    main()
