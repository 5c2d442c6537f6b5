"""What the machine can do: each process computes its half of the model, and no message is sent.

Each half is given what the other one would send: the values and gradients of an unsplit pass.
"""

from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.functional import mse_loss

from benchmarks.throughput.contestants import NUM_STAGES, Work
from benchmarks.throughput.processes import Key, Part
from penstock.runtime.construction import keep_freed_memory

NAME = "no messages (limit)"
NAMES = (NAME,)


def prepare(rank: int, work: Work, counts: tuple[int, ...]) -> dict[Key, Part]:
    """Make this process's half for every number of micro-batches; they share its layers."""
    dist.init_process_group("gloo")
    keep_freed_memory()
    size = work.num_blocks // NUM_STAGES
    layers = list(work.model())
    halves = [nn.Sequential(*layers[s * size : (s + 1) * size]) for s in range(NUM_STAGES)]
    own = {rank * size + place: layer for place, layer in enumerate(halves[rank])}
    return {(NAME, count): _part(rank, halves, work, count, own) for count in counts}


def _part(
    rank: int, halves: list[nn.Sequential], work: Work, count: int, own: dict[int, nn.Module]
) -> Part:
    inputs, targets = work.data()
    shares = list(zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True))
    borders = [_border(halves, x, y, len(inputs)) for x, y in shares]

    def run_step() -> None:
        half = halves[rank]
        half.zero_grad()
        for (x, y), (value, gradient) in zip(shares, borders, strict=True):
            if rank == 0:
                half(x).backward(gradient)
            else:
                _loss(half(value.detach().requires_grad_()), y, len(inputs)).backward()

    return Part(run_step, own)


def _border(halves: list[nn.Sequential], x: Tensor, y: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Give what crosses from one half to the other for a micro-batch, and its gradient."""
    value = halves[0](x).detach().requires_grad_()
    _loss(halves[1](value), y, size).backward()
    assert value.grad is not None
    return value.detach(), value.grad


def _loss(output: Tensor, target: Tensor, size: int) -> Tensor:
    return mse_loss(output, target) * (len(output) / size)
