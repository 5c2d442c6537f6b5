"""Small members of every family of models, the zoo's and the benchmarks', with all that is random
or hard in them switched on.

Whoever adds one here buys the laws of test_zoo_equality.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.alpa_paper.gshard import gshard_moe
from benchmarks.alpa_paper.wide_resnet import bottleneck_resnet
from penstock_recipes.zoo import (
    amoebanet_b,
    amoebanet_d,
    gpt,
    residual_network,
    transformer_lm,
    translation_transformer,
)
from tests.u_net import unet

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


def _words(length: int, most_pads: int = 0) -> Tensor:
    """Give sentences, each with up to `most_pads` pads at the end."""
    words = torch.randint(1, NUM_WORDS, (BATCH, length))
    num_pads = torch.arange(BATCH) % (most_pads + 1)
    return words * (torch.arange(length) < length - num_pads[:, None])


def _transformer_lm() -> Member:
    sizes: dict[str, Any] = {"width": 16, "ff_width": 24, "num_heads": 2, "max_length": 8}
    return transformer_lm(4, num_words=NUM_WORDS, dropout=0.1, **sizes), _words(8)


def _gpt(*, tied: bool) -> Member:
    sizes: dict[str, Any] = {"num_layers": 4, "width": 16, "num_heads": 2, "max_length": 8}
    return gpt(num_words=NUM_WORDS, dropout=0.1, tied=tied, **sizes), _words(8)


def _translation(**options: Any) -> Member:
    sizes: dict[str, Any] = {"width": 16, "head_width": 8, "max_length": 8}
    model = translation_transformer(3, 24, 4, num_words=NUM_WORDS, dropout=0.1, **sizes, **options)
    return model, (_words(7, most_pads=4), _words(6, most_pads=2))


def _gshard_moe(*, tied: bool) -> Member:
    sizes: dict[str, Any] = {"num_layers": 4, "width": 16, "num_heads": 2, "num_experts": 3}
    options: dict[str, Any] = {"max_length": 8, "capacity_factor": 0.6, "dropout": 0.1}
    return gshard_moe(num_words=NUM_WORDS, tied=tied, **sizes, **options), _words(8)


ZOO_MEMBERS: dict[str, Callable[[], Member]] = {
    "residual_network": _residual,
    "amoebanet_d": _amoebanet_d,
    "amoebanet_b": _amoebanet_b,
    "resnet": _resnet,
    "wide_resnet": _wide_resnet,
    "unet": _unet,
    "unet, group norm": _unet_group_norm,
    "transformer_lm": _transformer_lm,
    "gpt, tied": lambda: _gpt(tied=True),
    "gpt, untied": lambda: _gpt(tied=False),
    "translation, decoder tied": _translation,
    "translation, all tied": lambda: _translation(tied="all"),
    "translation, untied, clipped": lambda: _translation(tied="nothing", logit_clip=0.5),
    "gshard_moe, tied": lambda: _gshard_moe(tied=True),
    "gshard_moe, untied": lambda: _gshard_moe(tied=False),
}
"""Name -> what makes the member; it draws weights and inputs from torch's global generator."""
