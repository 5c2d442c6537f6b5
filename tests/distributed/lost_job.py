"""A process is killed while a child that it forked lives on, and so holds all that it had open.

python -m tests.distributed.lost_job RANK [FOLDER]

With FOLDER that is while all of them write to it, and the last one takes for ever.
"""

import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import torch
from torch import nn

import penstock
from penstock.checkpoint.files import write_state
from penstock.checkpoint.together import write_together
from penstock.errors import PenstockError

TIMEOUT_S = 3600.0


def die_but_for_a_child() -> None:
    """Be killed, and leave a child behind, as a DataLoader's worker may stay."""
    if os.fork() == 0:
        for output in (1, 2):  # which the test reads to their end
            os.close(output)
        while True:
            signal.pause()
    os.kill(os.getpid(), signal.SIGKILL)


def save(mesh: penstock.Mesh, folder: Path) -> None:
    def write(unfinished: Path) -> dict[str, str]:
        if str(mesh.rank) == sys.argv[1]:
            die_but_for_a_child()
        if mesh.rank == mesh.world_size - 1:
            threading.Event().wait()
        return {}

    write_together(mesh, folder, lambda _: None, write, partial(write_state, {})).wait()


def main() -> None:
    torch.set_num_threads(1)
    mesh = penstock.init_mesh(timeout_s=TIMEOUT_S)
    layers = [nn.Linear(2, 2) for _ in range(mesh.num_stages)]
    pipe = penstock.Pipeline(layers, mesh=mesh, loss=nn.MSELoss(), num_microbatches=1)
    try:
        for _ in range(3):
            pipe.train_step(torch.ones(2, 2), torch.zeros(2, 2))
            if len(sys.argv) > 2:
                save(mesh, Path(sys.argv[2]))
            if str(mesh.rank) == sys.argv[1]:
                die_but_for_a_child()
    except PenstockError as error:
        sys.exit(f"ENDED {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
