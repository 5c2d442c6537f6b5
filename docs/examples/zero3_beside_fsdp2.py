"""Train the same layers by FSDP2 and by sharding="zero3"; compare bytes and bits.

torchrun --nproc-per-node 2 docs/examples/zero3_beside_fsdp2.py
"""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import penstock

torch.manual_seed(0)
torch.set_num_threads(1)
blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
inputs, targets, loss = torch.randn(16, 64), torch.randn(16, 64), nn.MSELoss()
whole, wrapped = (nn.Sequential(*copy.deepcopy(blocks)) for _ in range(2))

mesh = penstock.init_mesh(num_stages=1, num_shards=2, device="cpu")
for block in wrapped:
    fully_shard(block)
fully_shard(wrapped)
options = {"mesh": mesh, "num_microbatches": 1, "loss": loss, "example_inputs": inputs}
pipe = penstock.Pipeline(blocks, sharding="zero3", **options)

half = slice(8 * mesh.rank, 8 * mesh.rank + 8)  # FSDP2's processes share the samples by hand
models = (whole, wrapped, pipe)
optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
for _ in range(5):
    loss(whole(inputs), targets).backward()
    loss(wrapped(inputs[half]), targets[half]).backward()
    pipe.train_step(inputs, targets)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def num_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes of parameters in this process."""
    return sum(getattr(p, "to_local", lambda p=p: p)().nbytes for p in parameters)


with torch.no_grad():
    expected = whole(inputs)
    outputs = {"plain": expected, "FSDP2": wrapped(inputs), "zero3": pipe.eval_step(inputs)}
if mesh.is_first_rank:
    for (name, output), model in zip(outputs.items(), models, strict=True):
        difference = float((output - expected).abs().max())
        print(f"{name}: {num_bytes(model.parameters()):,} bytes, differs by {difference:.1e}")
mesh.close()
