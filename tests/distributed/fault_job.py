"""What each process of a fault test runs: train, and go wrong at one instruction.

    python -m tests.distributed.fault_job RANK KIND ACTION [REPLICAS]

At the second instruction of KIND, rank RANK raises, is killed (kill -9) or is stopped (SIGSTOP).
"""

import os
import signal
import sys
from typing import Any

import torch
from torch import nn

import penstock
from penstock.runtime.executor import Executor
from penstock.schedules import ir

DEADLINE_S = 6.0


def go_wrong(action: str) -> None:
    """Do what ACTION says."""
    match action:
        case "raise":
            raise ValueError("injected")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)


def inject(kind: str, action: str) -> None:
    """Let the executor of this process go wrong when it comes to the instruction."""
    execute, seen = Executor._execute, []

    def faulty(self: Executor, instruction: ir.Instruction) -> None:
        if type(instruction).__name__ == kind:
            seen.append(instruction)
            if len(seen) == 2:
                go_wrong(action)
        execute(self, instruction)

    Executor._execute = faulty  # type: ignore[method-assign]


def main() -> None:
    """Train until something goes wrong."""
    rank, kind, action, replicas = sys.argv[1:5]
    world = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    mesh = penstock.init_mesh(num_replicas=int(replicas), timeout_s=60.0)
    assert mesh.background is not None
    mesh.background.timeout_s = DEADLINE_S  # processes may start far apart on a busy machine
    if mesh.rank == int(rank):
        inject(kind, action)
    torch.manual_seed(0)
    layers: list[Any] = [
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(world // int(replicas))
    ]
    pipe = penstock.Pipeline(layers, mesh=mesh, num_microbatches=3, loss=nn.MSELoss())
    x, y = torch.randn(12, 4), torch.randn(12, 4)
    try:
        for _ in range(3):
            pipe.train_step(x, y)
    except (penstock.PenstockError, ValueError) as error:
        where = "; ".join(getattr(error, "__notes__", []))
        sys.exit(f"ENDED {type(error).__name__}: {error} {where}")


if __name__ == "__main__":
    main()
