"""Small members of every family of the zoo; adding one here buys every law."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.zoo import gpt, gshard_moe, transformer_lm, translation_transformer

BATCH, NUM_WORDS = 5, 23
Member = Callable[[], tuple[nn.Module, Any]]


def words(length: int, num_pads: int = 0) -> Tensor:
    """Give sentences, of which each but the first ends in up to `num_pads` pads."""
    generator = torch.Generator().manual_seed(length)
    found = torch.randint(1, NUM_WORDS, (BATCH, length), generator=generator)
    for row in range(BATCH):
        found[row, length - row % (num_pads + 1) :] = 0
    return found


def scaling_model() -> tuple[nn.Module, Any]:
    model = transformer_lm(
        4, width=16, ff_width=24, num_heads=2, num_words=NUM_WORDS, max_length=8, dropout=0.1
    )
    return model, words(8)


def decoder(*, tied: bool) -> tuple[nn.Module, Any]:
    sizes: dict[str, Any] = {"num_layers": 4, "width": 16, "num_heads": 2}
    model = gpt(**sizes, num_words=NUM_WORDS, max_length=8, dropout=0.1, tied=tied)
    return model, words(8)


def translation(**options: Any) -> tuple[nn.Module, Any]:
    model = translation_transformer(
        3, 24, 4, num_words=NUM_WORDS, width=16, head_width=8, dropout=0.1, **options
    )
    return model, (words(7, num_pads=4), words(6, num_pads=2))


def mixture(*, tied: bool) -> tuple[nn.Module, Any]:
    sizes: dict[str, Any] = {"num_layers": 4, "width": 16, "num_heads": 2, "num_experts": 3}
    options: dict[str, Any] = {"max_length": 8, "capacity_factor": 0.6, "dropout": 0.1}
    model = gshard_moe(**sizes, num_words=NUM_WORDS, tied=tied, **options)
    return model, words(8)


ZOO_MEMBERS: dict[str, Member] = {
    "transformer_lm": scaling_model,
    "gpt, tied": lambda: decoder(tied=True),
    "gpt, untied": lambda: decoder(tied=False),
    "translation, decoder tied": translation,
    "translation, all tied": lambda: translation(tied="all"),
    "translation, untied, clipped": lambda: translation(tied="nothing", logit_clip=0.5),
    "gshard_moe, tied": lambda: mixture(tied=True),
    "gshard_moe, untied": lambda: mixture(tied=False),
}
