"""Small members of every family of the zoo, with all that is random or hard in them switched on.

Whoever adds one here buys the laws of test_zoo_equality.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.zoo import (
    amoebanet_b,
    amoebanet_d,
    bottleneck_resnet,
    gpt,
    gshard_moe,
    residual_network,
    transformer_lm,
    translation_transformer,
    unet,
)

BATCH = 9
"""Samples of an example, so that four micro-batches are uneven, and none has one sample only."""

NUM_WORDS = 23

Member = tuple[nn.Module, Any]
"""A model, and what it is called with: `BATCH` samples along dimension 0 of each tensor."""


def _residual() -> Member:
    return residual_network(4, 4, dropout=0.2), torch.randn(BATCH, 1, 8, 8)


def _amoebanet_d() -> Member:
    model = amoebanet_d(3, 16, num_classes=5, image_size=32, drop_path=0.3)
    return model, torch.randn(BATCH, 3, 32, 32)


def _amoebanet_b() -> Member:
    model = amoebanet_b(
        4, 16, num_classes=5, in_channels=1, image_size=11, drop_path=0.3, small=True
    )
    return model, torch.randn(BATCH, 1, 11, 11)


def _resnet() -> Member:
    return bottleneck_resnet((1, 2), 4, num_classes=5), torch.randn(BATCH, 3, 24, 17)


def _wide_resnet() -> Member:
    return bottleneck_resnet((1, 1, 1), 4, 2, num_classes=5), torch.randn(BATCH, 3, 17, 24)


def _unet() -> Member:
    return unet(depth=3, width=4, out_channels=2, dropout=0.2), torch.randn(BATCH, 3, 11, 14)


def _unet_group_norm() -> Member:
    model = unet(depth=2, width=4, norm="group", dropout=0.2)
    return model, torch.randn(BATCH, 3, 8, 9)


def _words(length: int, num_pads: int = 0) -> Tensor:
    """Give sentences, of which each but the first ends in up to `num_pads` pads."""
    generator = torch.Generator().manual_seed(length)
    found = torch.randint(1, NUM_WORDS, (BATCH, length), generator=generator)
    for row in range(BATCH):
        found[row, length - row % (num_pads + 1) :] = 0
    return found


def _scaling_model() -> Member:
    model = transformer_lm(
        4, width=16, ff_width=24, num_heads=2, num_words=NUM_WORDS, max_length=8, dropout=0.1
    )
    return model, _words(8)


def _decoder(*, tied: bool) -> Member:
    sizes: dict[str, Any] = {"num_layers": 4, "width": 16, "num_heads": 2}
    model = gpt(**sizes, num_words=NUM_WORDS, max_length=8, dropout=0.1, tied=tied)
    return model, _words(8)


def _translation(**options: Any) -> Member:
    model = translation_transformer(
        3, 24, 4, num_words=NUM_WORDS, width=16, head_width=8, dropout=0.1, **options
    )
    return model, (_words(7, num_pads=4), _words(6, num_pads=2))


def _mixture(*, tied: bool) -> Member:
    sizes: dict[str, Any] = {"num_layers": 4, "width": 16, "num_heads": 2, "num_experts": 3}
    model = gshard_moe(**sizes, num_words=NUM_WORDS, max_length=8, dropout=0.1, tied=tied)
    return model, _words(8)


ZOO_MEMBERS: dict[str, Callable[[], Member]] = {
    "residual_network": _residual,
    "amoebanet_d": _amoebanet_d,
    "amoebanet_b": _amoebanet_b,
    "resnet": _resnet,
    "wide_resnet": _wide_resnet,
    "unet": _unet,
    "unet, group norm": _unet_group_norm,
    "transformer_lm": _scaling_model,
    "gpt, tied": lambda: _decoder(tied=True),
    "gpt, untied": lambda: _decoder(tied=False),
    "translation, decoder tied": _translation,
    "translation, all tied": lambda: _translation(tied="all"),
    "translation, untied, clipped": lambda: _translation(tied="nothing", logit_clip=0.5),
    "gshard_moe, tied": lambda: _mixture(tied=True),
    "gshard_moe, untied": lambda: _mixture(tied=False),
}
"""Name -> what makes the member; it draws weights and inputs from torch's global generator."""
