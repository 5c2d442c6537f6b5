"""Train a pipeline with Lightning, in one process, or with torchrun in two."""

from typing import Any

import lightning
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import penstock


class Trained(lightning.LightningModule):
    """A pipeline in Lightning's loop; the pipeline itself runs the backward passes."""

    def __init__(self, pipe: penstock.Pipeline) -> None:
        super().__init__()
        self.pipe = pipe
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.pipe.train_step(batch)
        penstock.clip_grad_norm_(self.pipe, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if self.pipe.mesh.is_first_rank:
            print(f"step {index}: loss {loss:.6f}")

    def validation_step(self, batch: Any, index: int) -> None:
        loss = self.pipe.eval_step(batch).loss
        if self.pipe.mesh.is_first_rank:
            print(f"validation: loss {loss:.6f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.pipe.parameters(), lr=1e-2)


torch.manual_seed(0)
config = GPT2Config(n_layer=4, n_embd=32, n_head=4, vocab_size=64, n_positions=32, use_cache=False)
words = torch.randint(64, (48, 16))
mesh = penstock.init_mesh(num_stages=2)
batch = {"input_ids": words[:8], "labels": words[:8]}
pipe = penstock.Pipeline(
    GPT2LMHeadModel(config), mesh=mesh, num_microbatches=4, example_inputs=batch
)
examples = [{"input_ids": row, "labels": row} for row in words]
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    devices=1,
    plugins=LightningEnvironment(),  # each process runs the whole loop; the mesh joins them
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Trained(pipe), DataLoader(examples[:40], 8), DataLoader(examples[40:], 8))
penstock.save_pretrained("lightning-trained", pipe)
mesh.close()
