"""Small models of Hugging Face, with a batch and a loss each; equal at every call."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

NUM_WORDS, WIDTH, NUM_LAYERS, NUM_HEADS = 256, 128, 6, 4
BATCH, LENGTH, SIDE, NUM_CLASSES = 16, 64, 32, 10
_BLOCKS = {"num_hidden_layers": NUM_LAYERS, "num_attention_heads": NUM_HEADS, "hidden_size": WIDTH}
_WORDS = {"vocab_size": NUM_WORDS, **_BLOCKS}
_WIDE = {"intermediate_size": 4 * WIDTH}
_GPT2 = {"n_embd": WIDTH, "n_layer": NUM_LAYERS, "n_head": NUM_HEADS, "vocab_size": NUM_WORDS}
_OF_LLAMA = {**_WORDS, **_WIDE, "num_key_value_heads": NUM_HEADS, "use_cache": False}
_VIT = {"image_size": SIDE, "patch_size": 4, "num_labels": NUM_CLASSES}
MODELS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", _OF_LLAMA),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _OF_LLAMA),
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", {**_GPT2, "use_cache": False}),
    "OPT": ("OPTConfig", "OPTForCausalLM", {**_WORDS, "ffn_dim": 4 * WIDTH, "use_cache": False}),
    "BERT": ("BertConfig", "BertForMaskedLM", {**_WORDS, **_WIDE}),
    "ViT": ("ViTConfig", "ViTForImageClassification", {**_BLOCKS, **_WIDE, **_VIT}),
}
"""By name: the classes of the configuration and of the model, and what is not their default."""


def hugging_face(name: str) -> tuple[nn.Module, Tensor, Tensor, Callable[[Any, Tensor], Tensor]]:
    """Return the model of a name, a batch, its targets and the loss."""
    library = import_module("transformers")
    of_config, of_model, sizes = MODELS[name]
    config = getattr(library, of_config)(**sizes)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = getattr(library, of_model)(config)
    generator = torch.Generator().manual_seed(1)
    if name == "ViT":
        images = torch.randn((BATCH, 3, SIDE, SIDE), generator=generator)
        return model, images, torch.randint(NUM_CLASSES, (BATCH,), generator=generator), _loss
    words = torch.randint(NUM_WORDS, (BATCH, LENGTH), generator=generator)
    return model, words, words.roll(-1, 1), _loss


def _loss(output: Any, targets: Tensor) -> Tensor:
    return cross_entropy(output["logits"].flatten(0, -2), targets.flatten())
