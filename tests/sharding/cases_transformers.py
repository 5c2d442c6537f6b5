"""Blocks of transformers that the fuzz divides, in tiny sizes."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, LlamaConfig, MixtralConfig, T5Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.mixtral.modeling_mixtral import (
    MixtralDecoderLayer,
    MixtralRotaryEmbedding,
)
from transformers.models.t5.modeling_t5 import T5Block

from tests.sharding.fuzz import Case

_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "attention_dropout": 0.1,
}


class Block(nn.Module):
    """A block that is given (B, T, D) and gives it, with its own rotations if it has such."""

    def __init__(self, block: Any, rotary: Any = None) -> None:
        super().__init__()
        self.block, self.rotary = block, rotary

    def forward(self, x: Tensor) -> Any:
        options = {}
        if self.rotary is not None:
            options["position_embeddings"] = self.rotary(x, torch.arange(x.shape[1])[None])
        output = self.block(x, **options)
        return output[0] if isinstance(output, tuple) else output


def gpt2() -> nn.Module:
    """Return a block of GPT-2 that drops attention weights."""
    config = GPT2Config(n_embd=16, n_head=4, n_layer=1)
    config._attn_implementation = "sdpa"
    return Block(GPT2Block(config, layer_idx=0))


def t5() -> nn.Module:
    """Return the first block of T5's encoder, which has the relative bias."""
    config = T5Config(d_model=16, d_kv=4, num_heads=4, d_ff=24, feed_forward_proj="gated-gelu")
    config._attn_implementation = "eager"
    return Block(T5Block(config, has_relative_attention_bias=True, layer_idx=0))


def llama() -> nn.Module:
    """Return a block of Llama, whose heads are looked at in groups."""
    config = LlamaConfig(**_SIZES)
    config._attn_implementation = "sdpa"
    return Block(LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config))


def mixtral() -> nn.Module:
    """Return a block of Mixtral, whose experts are an opaque module."""
    config = MixtralConfig(num_local_experts=4, **_SIZES)
    config._attn_implementation, config._experts_implementation = "sdpa", "eager"
    block = MixtralDecoderLayer(config, 0)
    for weight in block.mlp.parameters():  # left as they are
        nn.init.normal_(weight, std=0.2)
    return Block(block, MixtralRotaryEmbedding(config))


SHAPE, OTHERS = (4, 6, 16), ((3, 5, 16), (1, 4, 16))
CASES = [
    Case("gpt2", gpt2, SHAPE, OTHERS),
    Case("t5", t5, SHAPE, OTHERS),
    Case("llama", llama, SHAPE, OTHERS),
    Case("mixtral", mixtral, SHAPE, OTHERS),
]
