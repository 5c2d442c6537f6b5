"""What each process of a fault test runs: train, saving after every step, and go wrong once.

    python -m tests.distributed.fault_job RANK KIND ACTION REPLICAS FOLDER

In the third step, process RANK raises, is killed (kill -9) or is stopped (SIGSTOP): at the second
instruction of KIND, or the only one; or, with KIND Save, while it writes the checkpoint after that
step; with KIND Layer, inside the forward of a layer; with KIND Batch it is given another batch
than the others, as ACTION says.  With RANK none it goes on from the newest checkpoint in FOLDER,
to the end.  In the environment: STAGES_PER_RANK, how many stages each process runs; SHARDS, how
many processes share a stage, or each one ("1 2").
"""

import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock import schedules
from penstock.checkpoint import save
from penstock.planner.placement import Placement
from penstock.runtime.executor import Executor
from penstock.schedules import ir
from penstock.transport import crossing
from tests.distributed.train_job import go_wrong

DEADLINE_S = 6.0
STEPS, FAULTY_STEP = 4, 3
OTHERS = {
    "fewer": lambda x, y: (x[:-1], y[:-1]),
    "wider": lambda x, y: (torch.cat([x, x], 1), y),
    "precise": lambda x, y: (x, y.double()),
    "none": lambda x, y: (None, y),
}
"""Batches that one process is given, of those that all are given."""
ONCE_A_STEP = ("CommitStatistics", "ReduceGradients")


def inject(kind: str, action: str) -> None:
    """Let the executor of this process go wrong when it comes to the instruction."""
    execute, seen = Executor._execute, []

    def in_layer(self: nn.Dropout, x: Tensor) -> Tensor:
        go_wrong(action)
        return x

    def faulty(self: Executor, instruction: ir.Instruction) -> None:
        is_now = self._run.streams.step == FAULTY_STEP - 1
        if is_now and kind == "Layer":
            nn.Dropout.forward = in_layer  # type: ignore[method-assign, assignment]
        elif is_now and type(instruction).__name__ == kind:
            seen.append(instruction)
            if len(seen) == (1 if kind in ONCE_A_STEP else 2):
                go_wrong(action)
        execute(self, instruction)

    Executor._execute = faulty  # type: ignore[method-assign]


def inject_into_save(action: str) -> None:
    """Let this process go wrong when it writes its shard of the faulty step's checkpoint."""
    write = save.save_tensors  # type: ignore[attr-defined]

    def faulty(tensors: Any, file: Path, header: Any = None) -> None:
        if f"step-{FAULTY_STEP}" in str(file):
            go_wrong(action)
        write(tensors, file, header)

    save.save_tensors = faulty  # type: ignore[attr-defined]


def inject_into_batch(action: str) -> None:
    """Let this process train on another batch than the others in the faulty step."""
    train_step = penstock.Pipeline.train_step

    def faulty(self: penstock.Pipeline, x: Tensor, y: Tensor) -> Tensor:
        is_now = self.step == FAULTY_STEP - 1
        return train_step(self, *(OTHERS[action](x, y) if is_now else (x, y)))

    penstock.Pipeline.train_step = faulty  # type: ignore[method-assign, assignment]


def newest(folder: Path) -> Path | None:
    return max(folder.glob("step-*"), default=None)


def train(
    mesh: penstock.Mesh, num_layers: int, folder: Path, deadline_s: float | None = None
) -> int:
    """Train to the end from the newest checkpoint; give the step it was of.

    The deadline holds once a checkpoint is complete: on a busy machine, processes may start far
    apart, and the first write may be slow.
    """
    torch.manual_seed(0)
    layers: list[Any] = [
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2))
        for _ in range(num_layers)
    ]
    shared: dict[str, Any] = {"sharding": "megatron", "example_inputs": torch.zeros(4, 4)}
    per_rank = int(os.environ.get("STAGES_PER_RANK", "1"))
    pipe = penstock.Pipeline(
        layers,
        mesh=mesh,
        schedule=schedules.interleaved_1f1b(per_rank) if per_rank > 1 else schedules.gpipe,
        num_microbatches=3,
        loss=nn.MSELoss(),
        threads_per_stage=1,
        **(shared if os.environ.get("SHARDS") else {}),
    )
    optimizer, begun_at = torch.optim.AdamW(pipe.parameters(), lr=0.05), newest(folder)
    if begun_at is not None:
        penstock.load_checkpoint(begun_at, pipe, optimizer)
    first, saving = pipe.step, None
    for step in range(first, STEPS):
        generator = torch.Generator().manual_seed(10 * step + mesh.replica)
        x, y = (torch.randn(12, 4, generator=generator) for _ in range(2))
        pipe.train_step(x, y)
        optimizer.step()
        optimizer.zero_grad()
        if saving is not None:
            saving.wait()
            if deadline_s is not None:
                mesh.background.timeout_s = deadline_s
        saving = penstock.async_save_checkpoint(folder / f"step-{step + 1}", pipe, optimizer)
    if saving is not None:
        saving.wait()
    pipe.close()
    return first


def mesh_of(num_replicas: int, shards: list[int]) -> penstock.Mesh:
    if len(shards) == 1:
        return penstock.init_mesh(num_replicas=num_replicas, num_shards=shards[0], timeout_s=60.0)
    crossing.FEW_BYTES = 32  # messages are small here
    ranks, meshes = iter(range(sum(shards))), list[tuple[tuple[int, ...], ...]]()
    for count in shards:
        meshes.append((tuple(islice(ranks, count)),))
    placement = Placement(tuple(meshes), ("cpu",) * len(shards))
    return penstock.init_mesh(placement=placement, timeout_s=60.0)


def main() -> None:
    rank, kind, action, replicas, folder = sys.argv[1:6]
    world, num_layers = int(os.environ["WORLD_SIZE"]), int(os.environ["NUM_LAYERS"])
    torch.set_num_threads(1)
    mesh = mesh_of(int(replicas), list(map(int, os.environ.get("SHARDS", "1").split())))
    assert mesh.world_size == world
    if str(mesh.rank) == rank and kind == "Save":
        inject_into_save(action)
    elif str(mesh.rank) == rank and kind == "Batch":
        inject_into_batch(action)
    elif str(mesh.rank) == rank:
        inject(kind, action)
    try:
        train(mesh, num_layers, Path(folder), None if rank == "none" else DEADLINE_S)
    except (penstock.PenstockError, ValueError) as error:
        where = "; ".join(getattr(error, "__notes__", []))
        sys.exit(f"ENDED {type(error).__name__}: {error} {where}")


if __name__ == "__main__":
    main()
