"""Train a Hugging Face model with the Trainer: python transformers_trainer.py FOLDER [--resume].

The same script runs under torchrun --nproc-per-node 2, with a stage in each process.
"""

import sys

import torch
from transformers import EvalPrediction, GPT2Config, GPT2LMHeadModel, TrainingArguments

import penstock
from penstock.integrations.transformers import PenstockTrainer

config = GPT2Config(n_layer=4, n_embd=32, n_head=4, vocab_size=64, n_positions=32, use_cache=False)
torch.manual_seed(0)
words = torch.randint(64, (64, 16))
examples = [{"input_ids": row, "labels": row} for row in words]


def accuracy(predictions: EvalPrediction) -> dict[str, float]:
    guesses = predictions.predictions[:, :-1].argmax(-1)
    return {"accuracy": float((guesses == predictions.label_ids[:, 1:]).mean())}


example = {"input_ids": words[:8], "labels": words[:8], "num_items_in_batch": torch.tensor(1)}
mesh = penstock.init_mesh(num_stages=2)
pipe = penstock.Pipeline(
    GPT2LMHeadModel(config),
    mesh=mesh,
    num_microbatches=4,
    example_inputs=example,
)
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=8,  # samples of a whole batch, which 4 micro-batches share
    max_steps=6,
    save_steps=3,
    logging_steps=1,
    learning_rate=1e-2,
    report_to="none",
)
trainer = PenstockTrainer(
    pipe,
    arguments,
    train_dataset=examples[:56],
    eval_dataset=examples[56:],
    compute_metrics=accuracy,
)
trainer.train(resume_from_checkpoint="--resume" in sys.argv)
metrics = trainer.evaluate()
if mesh.is_first_rank:
    print(f"accuracy {metrics['eval_accuracy']:.4f}")
trainer.save_model(f"{sys.argv[1]}/trained")  # GPT2LMHeadModel.from_pretrained loads it
mesh.close()
