"""One block of GPT on two processes: divided by Penstock, by hand, and by torch's DTensor."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import penstock
from benchmarks.sharding.memory import at_rest, saved
from benchmarks.throughput.processes import Key, Part
from penstock_recipes.zoo import gpt

NUM_SHARDS = 2
COLUMNS, ROWS = ("query", "key", "value", "widen"), ("output", "narrow")


class Size(NamedTuple):
    """A batch of B sequences of T positions, D channels."""

    batch: int
    length: int
    width: int

    def __str__(self) -> str:
        return "x".join(map(str, self))

    def block(self) -> nn.Module:
        """Build the block: the same parameters at every call."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            sizes: dict[str, Any] = {"num_layers": 1, "width": self.width, "num_heads": 4}
            return gpt(**sizes, num_words=2, max_length=2, dropout=0.0).blocks[0]

    def inputs(self) -> Tensor:
        """Return what the block is given."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(tuple(self), generator=generator)


class _Enter(torch.autograd.Function):
    """What all have alike is given to the own columns: gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient)
        return gradient


class _Leave(torch.autograd.Function):
    """Parts of a sum become the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class ByHand(nn.Module):
    """The block as Megatron writes it (Shoeybi et al. 2019, section 3)."""

    def __init__(self, block: Any, rank: int) -> None:
        super().__init__()
        attention, feed_forward = block.attention.attention, block.feed_forward
        self.num_heads = attention.num_heads // NUM_SHARDS
        self.norms = nn.ModuleList([block.attention.norm, block.norm])

        def part(linear: nn.Linear, dim: int) -> nn.Linear:
            own = deepcopy(linear)
            own.weight = nn.Parameter(linear.weight.detach().chunk(NUM_SHARDS, dim)[rank].clone())
            if dim == 0:
                own.bias = nn.Parameter(linear.bias.detach().chunk(NUM_SHARDS)[rank].clone())
            return own

        columns = (attention.query, attention.key, attention.value, feed_forward.widen)
        self.query, self.key, self.value, self.widen = (part(linear, 0) for linear in columns)
        self.output, self.narrow = part(attention.output, 1), part(feed_forward.narrow, 1)

    def forward(self, x: Tensor) -> Tensor:
        normal = _Enter.apply(self.norms[0](x))
        q, k, v = (
            linear(normal).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self._summed(mixed.transpose(1, 2).flatten(2), self.output)
        wide = self.widen(_Enter.apply(self.norms[1](x)))
        wide = nn.functional.gelu(wide, approximate="tanh")
        return x + self._summed(wide, self.narrow)

    def _summed(self, x: Tensor, rows: nn.Linear) -> Tensor:
        product = nn.functional.linear(x, rows.weight)
        total: Tensor = _Leave.apply(product)
        return total + rows.bias


def by_dtensor(block: Any, mesh: Any) -> nn.Module:
    """Divide the block by torch's `parallelize_module`."""
    block.attention.attention.num_heads //= NUM_SHARDS
    names = [name for name, part in block.named_modules() if isinstance(part, nn.Linear)]
    plan: dict[str, Any] = {
        name: ColwiseParallel() if name.rpartition(".")[2] in COLUMNS else RowwiseParallel()
        for name in names
    }
    return parallelize_module(block, mesh, plan)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Return a loss of what the block gives."""
    return (output - targets).square().mean()


def prepare(rank: int, sizes: Sequence[Size], counts: tuple[int, ...]) -> dict[Key, Part]:
    """Make this process's part of all contestants, and what counts its memory."""
    mesh = penstock.init_mesh(num_shards=NUM_SHARDS, device="cpu")
    torch_mesh = init_device_mesh("cpu", (NUM_SHARDS,))
    found: dict[Key, Part] = {}
    for number, size in enumerate(sizes):
        x = size.inputs()
        pipe = penstock.Pipeline(
            nn.Sequential(size.block()),
            num_microbatches=1,
            loss=loss,
            example_inputs=x,
            mesh=mesh,
            sharding="megatron",
        )
        hand = ByHand(size.block(), rank)
        peer = by_dtensor(size.block(), torch_mesh)

        def piped(pipe: penstock.Pipeline = pipe, x: Tensor = x) -> float:
            pipe.zero_grad(set_to_none=True)
            return float(pipe.train_step(x, x))

        found["Penstock", number] = Part(piped, {})
        found["by hand", number] = Part(_step(hand, x), {})
        found["DTensor", number] = Part(_step(peer, x), {})
    found["at rest", 0] = Part(lambda: at_rest(mesh), {})
    found["saved", 0] = Part(lambda: saved(mesh), {})
    return found


def _step(module: nn.Module, x: Tensor) -> Callable[[], float]:
    def step() -> float:
        module.zero_grad(set_to_none=True)
        total = loss(module(x), x)
        total.backward()
        return float(total.detach())

    return step
