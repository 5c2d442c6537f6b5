"""One process of a job that trains until something goes wrong; it says so, and ends.

python -m benchmarks.two_hosts.steps NUM_REPLICAS TIMEOUT_S
"""

import sys
from itertools import count

import torch
from torch import nn

import penstock
from penstock.errors import PenstockError


def main() -> None:
    """Train a small model; write a line after the first step, and the error that ended it."""
    num_replicas, timeout_s = int(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    mesh = penstock.init_mesh(num_replicas=num_replicas, timeout_s=timeout_s, device="cpu")
    layers = [nn.Linear(8, 8) for _ in range(mesh.num_stages)]
    pipe = penstock.Pipeline(layers, mesh=mesh, num_microbatches=2, loss=nn.MSELoss())
    try:
        for step in count():
            pipe.train_step(torch.ones(4, 8), torch.zeros(4, 8))
            pipe.zero_grad()
            if step == 0:
                print("trains", flush=True)
    except PenstockError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
