"""Train LoRA's adapters on a pipeline: python peft_adapters.py FOLDER [lora|ia3]."""

import sys

import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import penstock
from penstock.integrations.peft import save_adapter

folder, kind = sys.argv[1], (*sys.argv, "lora")[2]
KINDS = {
    "lora": LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1),
    "ia3": IA3Config(
        target_modules=["c_attn", "c_fc"], feedforward_modules=["c_fc"], fan_in_fan_out=True
    ),
}


def make_base() -> GPT2LMHeadModel:
    """Return the model to adapt; its input and output embeddings are one tied, frozen weight."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=4, n_embd=32, n_head=4, vocab_size=64, use_cache=False)
    return GPT2LMHeadModel(config)


words = torch.arange(64).reshape(8, 8)
batch = {"input_ids": words, "labels": words}
mesh = penstock.init_mesh(num_stages=2)
pipe = penstock.Pipeline(
    get_peft_model(make_base(), KINDS[kind]), mesh=mesh, num_microbatches=4, example_inputs=batch
)
optimizer = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad], lr=1e-2)
for step in range(4):
    loss = pipe.train_step(**batch)
    optimizer.step()
    optimizer.zero_grad()
    if mesh.is_first_rank:
        print(f"step {step}: loss {loss.item().hex()}")
logits = pipe.eval_step(**batch).logits
save_adapter(folder, pipe)

if mesh.is_first_rank:  # one process has the whole model here, as it does for inference
    adapted = PeftModel.from_pretrained(make_base(), folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(**batch).logits, logits, rtol=0, atol=0)
    merged = adapted.merge_and_unload()
    merged.save_pretrained(f"{folder}/merged")
    with torch.no_grad():
        torch.testing.assert_close(merged(**batch).logits, logits)
mesh.close()
