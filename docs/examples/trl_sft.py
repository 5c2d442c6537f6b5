"""Fine-tune on completions with TRL's SFTTrainer: python trl_sft.py FOLDER.

The same script runs under torchrun --nproc-per-node 2, with a stage in each process.
"""

import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Trainer
from trl import SFTConfig, SFTTrainer

import penstock
from penstock.integrations.transformers import PenstockTrainer


class PenstockSFT(PenstockTrainer, SFTTrainer):
    """Prepare samples as TRL does, and train with the model's loss in the pipeline."""

    compute_loss, prediction_step = Trainer.compute_loss, Trainer.prediction_step


digits = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
words = {word: i for i, word in enumerate(["<pad>", "<end>", "plus", "is", *digits])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
processing = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
)
sums = [(i, j) for i in range(10) for j in range(10 - i)]
rows = [
    {"prompt": f"{digits[i]} plus {digits[j]} is", "completion": f" {digits[i + j]}"}
    for i, j in sums[:48]
]

torch.manual_seed(0)
config = GPT2Config(
    n_layer=4, n_embd=32, n_head=4, vocab_size=len(words), n_positions=16, use_cache=False
)
tokens = torch.zeros(8, 8, dtype=torch.long)
example = {"input_ids": tokens, "attention_mask": tokens + 1, "labels": tokens}
mesh = penstock.init_mesh(num_stages=2)
pipe = penstock.Pipeline(
    GPT2LMHeadModel(config),
    mesh=mesh,
    num_microbatches=4,
    example_inputs={**example, "num_items_in_batch": torch.tensor(1)},
)
arguments = SFTConfig(
    output_dir=sys.argv[1],
    per_device_train_batch_size=8,  # samples of a whole batch, which 4 micro-batches share
    gradient_checkpointing=False,  # the pipeline recomputes: Pipeline(recompute=...)
    pad_to_multiple_of=8,
    max_steps=6,
    logging_steps=1,
    learning_rate=1e-2,
    bf16=False,
    report_to="none",
)
trainer = PenstockSFT(
    pipe,
    arguments,
    train_dataset=Dataset.from_list(rows[:40]),
    eval_dataset=Dataset.from_list(rows[40:]),
    processing_class=processing,
)
trainer.train()
loss = trainer.evaluate()["eval_loss"]
if mesh.is_first_rank:
    print(f"validation: loss {loss:.6f}")
trainer.save_model(f"{sys.argv[1]}/trained")  # with its tokenizer; from_pretrained loads both
mesh.close()
