"""The models that are captured: the usual libraries' own, of random weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.blocks import Block

transformers.logging.set_verbosity_error()

_NUM_WORDS, _LENGTH = 256, 64


@dataclass(frozen=True, slots=True)
class Example:
    """A model and what it is called with."""

    name: str
    make: Callable[[], tuple[nn.Module, dict[str, Any]]]


class Decoder(nn.Module):
    """A decoder as a module of its own, and not a Sequential: (B, T) -> (B, T, words)."""

    num_words = _NUM_WORDS

    def __init__(self, blocks: Sequence[nn.Module], width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.num_words, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, self.num_words)

    def forward(self, words_BT: Tensor) -> Tensor:
        """Give the logits."""
        x_BTD = self.embed(words_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits: Tensor = self.head(self.norm(x_BTD))
        return logits


def _words() -> Tensor:
    return torch.randint(0, _NUM_WORDS, (2, _LENGTH))


def _config(kind: str, **options: Any) -> Any:
    return getattr(transformers, f"{kind}Config")(**options)


def _causal(kind: str, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    config = _config(kind, **options)
    model = getattr(transformers, kind + ("LMHeadModel" if kind == "GPT2" else "ForCausalLM"))
    return model(config), {"input_ids": _words(), "use_cache": False}


def _gpt2() -> tuple[nn.Module, dict[str, Any]]:
    return _causal("GPT2", vocab_size=_NUM_WORDS, n_embd=64, n_layer=12, n_head=4)


def _llama() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12}
    return _causal("Llama", vocab_size=_NUM_WORDS, num_attention_heads=4, **sizes)


def _large_llama() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    with torch.device("meta"):
        model, inputs = _causal("Llama", vocab_size=128256, **sizes, **heads)
    return model, {name: _words() if name == "input_ids" else v for name, v in inputs.items()}


def _bert() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12}
    config = _config("Bert", vocab_size=_NUM_WORDS, num_attention_heads=4, **sizes)
    words = _words()
    mask = torch.ones_like(words)
    return transformers.BertForMaskedLM(config), {"input_ids": words, "attention_mask": mask}


def _t5() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4}
    layers = {"num_layers": 6, "num_decoder_layers": 6, "decoder_start_token_id": 0}
    config = _config("T5", vocab_size=_NUM_WORDS, pad_token_id=0, **sizes, **layers)
    inputs = {"input_ids": _words(), "decoder_input_ids": _words(), "use_cache": False}
    return transformers.T5ForConditionalGeneration(config), inputs


def _vit() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12}
    config = _config("ViT", num_attention_heads=4, image_size=32, patch_size=8, **sizes)
    return transformers.ViTForImageClassification(config), {
        "pixel_values": torch.randn(2, 3, 32, 32)
    }


def _plain() -> tuple[nn.Module, dict[str, Any]]:
    return Decoder([Block(64, 4) for _ in range(12)], 64), {"words_BT": _words()}


MODELS = (
    Example("GPT-2-like, hand-written, 12 blocks", _plain),
    Example("GPT-2, 12 blocks", _gpt2),
    Example("Llama, 12 blocks", _llama),
    Example("Llama, the shape of 70B, without weights", _large_llama),
    Example("BERT, 12 blocks", _bert),
    Example("T5, 6 + 6 blocks", _t5),
    Example("ViT, 12 blocks", _vit),
)
