"""Train GPT-2 on a text file, byte by byte: python docs/finetune_gpt2.py README.md [steps]."""

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import penstock

text = torch.tensor(list(Path(sys.argv[1]).read_bytes()))
num_steps = int(sys.argv[2]) if len(sys.argv) > 2 else 100
torch.manual_seed(0)
config = GPT2Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=4, n_head=4)
config.bos_token_id = config.eos_token_id = 0
model = GPT2LMHeadModel(config)


def batch() -> dict[str, torch.Tensor]:
    starts = torch.randint(len(text) - 64, (16, 1))
    words = text[starts + torch.arange(64)]
    return {"input_ids": words, "labels": words}


mesh = penstock.init_mesh(num_stages=2)
pipe = penstock.Pipeline(model, mesh=mesh, num_microbatches=4, example_inputs=batch())
optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
for step in range(1, num_steps + 1):
    loss = pipe.train_step(batch())
    optimizer.step()
    optimizer.zero_grad()
    if mesh.is_first_rank and step % 20 == 0:
        print(f"step {step}: {loss:.3f} nats a byte")
