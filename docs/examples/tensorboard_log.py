"""Log a pipeline's training to TensorBoard, in one process, or with torchrun in two."""

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import penstock

torch.manual_seed(0)
mesh = penstock.init_mesh(num_stages=2)
layers = [nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)]
pipe = penstock.Pipeline(layers, mesh=mesh, num_microbatches=8, loss=nn.MSELoss())
optimizer = torch.optim.AdamW(pipe.parameters())
writer = SummaryWriter("logs") if mesh.is_first_rank else None
for step in range(6):
    loss = pipe.train_step(inputs := torch.randn(32, 16), inputs)
    norm = penstock.clip_grad_norm_(pipe, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if writer is not None:
        writer.add_scalar("loss", loss, step)
        writer.add_scalar("gradient norm", norm, step)
        print(f"step {step}: loss {loss:.6f}")
if writer is not None:
    writer.close()
mesh.close()
