"""Train a pipeline with Accelerate, in one process, or with torchrun in two."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import penstock

torch.manual_seed(0)
config = GPT2Config(n_layer=4, n_embd=32, n_head=4, vocab_size=64, n_positions=32, use_cache=False)
words = torch.randint(64, (48, 16))
mesh = penstock.init_mesh(num_stages=2)
batch = {"input_ids": words[:8], "labels": words[:8]}
pipe = penstock.Pipeline(
    GPT2LMHeadModel(config), mesh=mesh, num_microbatches=4, example_inputs=batch
)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, total_iters=2)
examples = [{"input_ids": row, "labels": row} for row in words]
loader = DataLoader(
    examples, batch_size=8, generator=torch.Generator().manual_seed(0), shuffle=True
)

accelerator = Accelerator(cpu=mesh.device.type == "cpu")  # for its autocast and trackers
for step, batch in enumerate(loader):  # neither pipe nor loader is prepared: see the page
    with accelerator.autocast():
        loss = pipe.train_step(batch)
    penstock.clip_grad_norm_(pipe, 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if mesh.is_first_rank:
        print(f"step {step}: loss {loss:.6f}")
penstock.save_checkpoint("accelerated", pipe, optimizer, schedule=schedule.state_dict())
mesh.close()
