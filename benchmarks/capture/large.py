"""Time one model of a usual size until its first training step: `python large.py NAME`.

It stands alone, so that it also runs with another version of Penstock on PYTHONPATH.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import penstock

NUM_STAGES, NUM_MICROBATCHES = 2, 4
_SAMPLES, _LENGTH, _SIZE, _CLASSES = 4, 128, 224, 1000
_WINDOW, _HEAD = 7, 32


class _Squeeze(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        gates: Tensor = self.up(silu(self.down(x_BCHW.mean((2, 3), keepdim=True))))
        return x_BCHW * gates.sigmoid()


def _convolutions(inside: int, outside: int, stride: int) -> nn.Sequential:
    width = 4 * outside
    return nn.Sequential(
        nn.BatchNorm2d(inside),
        nn.Conv2d(inside, width, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.GELU(),
        nn.Conv2d(width, width, 3, stride, 1, groups=width, bias=False),
        nn.BatchNorm2d(width),
        nn.GELU(),
        _Squeeze(width, outside // 4),
        nn.Conv2d(width, outside, 1),
    )


class _Attention(nn.Module):
    """Attention inside windows of 7 x 7, or over a grid of 7 x 7 places, and an MLP."""

    def __init__(self, width: int, is_grid: bool) -> None:
        super().__init__()
        self.is_grid, self.num_heads = is_grid, width // _HEAD
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(self.num_heads, _WINDOW**2, _WINDOW**2))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        batch, width, *size = x_BCHW.shape
        h, w = (n // _WINDOW for n in size)
        if self.is_grid:
            split = x_BCHW.view(batch, width, _WINDOW, h, _WINDOW, w).permute(0, 3, 5, 2, 4, 1)
        else:
            split = x_BCHW.view(batch, width, h, _WINDOW, w, _WINDOW).permute(0, 2, 4, 3, 5, 1)
        x_NTC = split.reshape(-1, _WINDOW**2, width)
        parts = self.qkv(self.norm(x_NTC)).view(-1, _WINDOW**2, 3, self.num_heads, _HEAD)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=self.bias).transpose(1, 2)
        x_NTC = x_NTC + self.out(mixed.reshape(x_NTC.shape))
        x_NTC = x_NTC + self.mlp(x_NTC)
        whole = x_NTC.view(batch, h, w, _WINDOW, _WINDOW, width)
        order = (0, 5, 3, 1, 4, 2) if self.is_grid else (0, 5, 1, 3, 2, 4)
        return whole.permute(*order).reshape(x_BCHW.shape)


class _MaxViTBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.convolutions = _convolutions(inside, outside, stride)
        self.shortcut = (
            nn.Sequential(nn.AvgPool2d(stride), nn.Conv2d(inside, outside, 1))
            if stride > 1
            else nn.Identity()
        )
        self.windows, self.grid = _Attention(outside, False), _Attention(outside, True)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = self.shortcut(x_BCHW) + self.convolutions(x_BCHW)
        result: Tensor = self.grid(self.windows(x_BCHW))
        return result


class MaxViT(nn.Module):
    """MaxViT-T (Tu et al. 2022): convolutions, attention in windows, attention over a grid."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64] * 2 + [128] * 2 + [256] * 5 + [512] * 2
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 3, 2, 1, bias=False),
            nn.BatchNorm2d(64),
            nn.GELU(),
            nn.Conv2d(64, 64, 3, 1, 1),
        )
        self.blocks = nn.ModuleList(
            _MaxViTBlock(inside, outside, 2 if n in (0, 2, 4, 9) else 1)
            for n, (inside, outside) in enumerate(zip([64, *widths], widths, strict=False))
        )
        self.norm, self.head = nn.LayerNorm(512), nn.Linear(512, _CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x_BCHW = self.stem(pixel_values)
        for block in self.blocks:
            x_BCHW = block(x_BCHW)
        logits = self.head(self.norm(x_BCHW.mean((2, 3))))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def _images() -> dict[str, Any]:
    pixels = torch.randn(_SAMPLES, 3, _SIZE, _SIZE)
    return {"pixel_values": pixels, "labels": torch.randint(0, _CLASSES, (_SAMPLES,))}


def _words() -> dict[str, Any]:
    words = torch.randint(0, 30_000, (_SAMPLES, _LENGTH))
    return {"input_ids": words, "labels": words, "attention_mask": torch.ones_like(words)}


def _swin() -> nn.Module:
    config = transformers.SwinConfig()
    config.num_labels = _CLASSES
    return transformers.SwinForImageClassification(config)


def _bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig())


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "Swin-T": (_swin, _images),
    "MaxViT-T": (MaxViT, _images),
    "BERT, 12 blocks": (_bert, _words),
    "GPT-2, 12 blocks": (_gpt2, _words),
}


def timed(name: str) -> dict[str, float]:
    """Make a pipeline of a model and run its first step; return what both took."""
    torch.manual_seed(0)
    make, examples = MODELS[name]
    model, batch = make().train(), examples()
    start_s = time.perf_counter()
    pipe = penstock.Pipeline(
        model,
        num_stages=NUM_STAGES,
        num_microbatches=NUM_MICROBATCHES,
        example_inputs=batch,
    )
    ready_s = time.perf_counter()
    with pipe:
        pipe.train_step(batch)
    step_s = time.perf_counter() - ready_s
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, "ready_s": ready_s - start_s, "step_s": step_s}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    json.dump(timed(sys.argv[1]), sys.stdout)
