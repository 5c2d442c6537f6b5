"""Models that are no chain of layers: small configurations of the usual libraries, random weights.

Each is (model, function of a batch size that gives what the model is called with).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, pad

transformers.logging.set_verbosity_error()

NUM_WORDS, LENGTH = 61, 7
Made = tuple[nn.Module, Callable[[int], Any]]


@dataclass(frozen=True, slots=True)
class AnyModel:
    """A model by name; `make` gives the same weights at every call."""

    name: str
    build: Callable[[], Made]

    def make(self) -> Made:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.build()


def words(batch: int, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(batch + length)
    return torch.randint(0, NUM_WORDS, (batch, length), generator=generator)


def pixels(size: int) -> Callable[[int], Tensor]:
    def draw(batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(batch)
        return torch.randn(batch, 3, size, size, generator=generator)

    return draw


def masked(batch: int) -> dict[str, Any]:
    mask = torch.ones(batch, LENGTH, dtype=torch.long)
    return {"input_ids": words(batch), "attention_mask": mask}


def make_config(kind: Any, **options: Any) -> Any:
    """Make a configuration; some options are known to the base class only."""
    return kind(**options)


def decoder(family: str, **options: Any) -> Callable[[], Made]:
    sizes: dict[str, Any] = {
        "vocab_size": NUM_WORDS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "head_dim": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, f"{family}Config")(**{**sizes, **options})
    return lambda: (getattr(transformers, f"{family}ForCausalLM")(config), masked)


def gpt2() -> Made:
    config = transformers.GPT2Config(
        vocab_size=NUM_WORDS,
        n_embd=32,
        n_layer=5,
        n_head=4,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config), masked


def bert() -> Made:
    config = transformers.BertConfig(
        vocab_size=NUM_WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
    )
    return transformers.BertForMaskedLM(config), masked


def t5() -> Made:
    config = make_config(
        transformers.T5Config,
        vocab_size=NUM_WORDS,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=4,
        num_decoder_layers=4,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
    )

    def inputs(batch: int) -> dict[str, Any]:
        return {**masked(batch), "decoder_input_ids": words(batch, 5), "use_cache": False}

    return transformers.T5ForConditionalGeneration(config), inputs


def vit() -> Made:
    config = make_config(
        transformers.ViTConfig,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
        num_labels=3,
    )
    return transformers.ViTForImageClassification(config), lambda n: {
        "pixel_values": pixels(16)(n)
    }


def clip() -> Made:
    text = {
        "vocab_size": NUM_WORDS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
    }
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    return transformers.CLIPModel(config), lambda n: {**masked(n), "pixel_values": pixels(16)(n)}


def swin() -> Made:
    config = make_config(
        transformers.SwinConfig,
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=3,
    )
    model = transformers.SwinForImageClassification(config)
    return model, lambda n: {"pixel_values": pixels(32)(n)}


def whisper(layerdrop: float = 0.0) -> Made:
    config = transformers.WhisperConfig(
        vocab_size=NUM_WORDS,
        d_model=32,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        encoder_layerdrop=layerdrop,
        decoder_layerdrop=layerdrop,
    )

    def inputs(batch: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(batch)
        features = torch.randn(batch, 8, 20, generator=generator)
        return {
            "input_features": features,
            "decoder_input_ids": words(batch, 5),
            "use_cache": False,
        }

    return transformers.WhisperForConditionalGeneration(config), inputs


def mamba() -> Made:
    config = transformers.MambaConfig(
        vocab_size=NUM_WORDS, hidden_size=16, num_hidden_layers=5, state_size=4
    )
    return transformers.MambaForCausalLM(config), lambda n: {
        "input_ids": words(n),
        "use_cache": False,
    }


class Residual(nn.Module):
    """Two convolutions with BatchNorm, activations in place, and a way around them."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.last_norm = nn.BatchNorm2d(after)
        self.around: nn.Module | None = None
        if before != after:
            shorter = nn.Conv2d(before, after, 1, stride, bias=False)
            self.around = nn.Sequential(shorter, nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.last_norm(self.second(self.relu(self.norm(self.first(x)))))
        y += x if self.around is None else self.around(x)
        return self.relu(y)


class ResNet(nn.Module):
    """Residual blocks in two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.group1 = nn.Sequential(Residual(8, 8), Residual(8, 8))
        self.group2 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.group2(self.group1(self.relu(self.norm(self.stem(x)))))
        return self.head(torch.flatten(self.pool(x), 1))


class Convolved(nn.Sequential):
    """Convolution, BatchNorm, activation in place."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, 1, 1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)
        )


class UNet(nn.Module):
    """Long skips, from the first layers to the last ones; a branch on shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Convolved(3, 8)
        self.downs = nn.ModuleList([Convolved(8, 16), Convolved(16, 32)])
        wider = [nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)]
        self.wideners = nn.ModuleList(wider)
        self.ups = nn.ModuleList([Convolved(32, 16), Convolved(16, 8)])
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.stem(x)]
        for down in self.downs:
            skips.append(down(max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for widen, up in zip(self.wideners, self.ups, strict=True):
            x, skip = widen(x), skips.pop()
            if x.shape[-1] != skip.shape[-1]:
                x = pad(x, (0, 1, 0, 1))
            x = up(torch.cat([skip, x], 1))
        return self.head(x)


class Branching(nn.Module):
    """Goes one way or another by what it computed; adds the first value again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.head = nn.Linear(16, NUM_WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.embed(x) * self.scale
        for n, layer in enumerate(self.layers):
            h = h + layer(h) if h.mean() > 0 else layer(h) * 0.5 + h
            if n % 2 and h.sum().item() < 1e9:
                h = h + first * 0.1
        return self.head(h * self.scale)


REQUIRED = (
    AnyModel("gpt2", gpt2),
    AnyModel("llama", decoder("Llama")),
    AnyModel("llama, tied", decoder("Llama", tie_word_embeddings=True)),
    AnyModel("mistral", decoder("Mistral")),
    AnyModel("qwen2", decoder("Qwen2")),
    AnyModel("qwen3", decoder("Qwen3")),
    AnyModel("mixtral", decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2)),
    AnyModel("bert", bert),
    AnyModel("t5", t5),
    AnyModel("vit", vit),
    AnyModel("clip", clip),
    AnyModel("swin", swin),
    AnyModel("whisper", whisper),
    AnyModel("whisper, layers dropped", lambda: whisper(0.5)),
    AnyModel("mamba", mamba),
    AnyModel("resnet", lambda: (ResNet(), pixels(16))),
    AnyModel("unet", lambda: (UNet(), pixels(16))),
    AnyModel("branching", lambda: (Branching(), words)),
)
