"""Modules that the fuzz divides: every rule stands in one of them."""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from penstock_recipes.zoo import transformer_lm
from tests.sharding import cases_language, cases_vision
from tests.sharding.fuzz import Case


class Functions(nn.Module):
    """Functions of torch one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(self.up(x).relu(), p=0.3, training=self.training)
        y = self.norm(self.down(dropped))
        merged = y.view(-1, y.shape[-1])
        heads = merged.unflatten(-1, (4, 2)).transpose(0, 1).softmax(-1)
        back = heads.transpose(0, 1).reshape(y.shape)
        return x + y * y + back / (y.exp() + 7) + (y[..., None] * 2).squeeze(-1)


def gpt_block() -> nn.Module:
    """Return one block of the zoo's Transformer, with dropout."""
    blocks = transformer_lm(2, width=8, ff_width=12, num_heads=4, num_words=16, dropout=0.2)
    return next(part for part in blocks.modules() if type(part).__name__.endswith("Block"))


CASES = [
    Case("functions", Functions, (4, 3, 8), ((3, 5, 8), (1, 2, 8))),
    Case("gpt block", gpt_block, (4, 6, 8), ((3, 5, 8), (1, 2, 8))),
    Case("embedding", partial(nn.Embedding, 11, 6), (3, 4), ((5, 3),), num_words=11),
    *cases_vision.CASES,
    *cases_language.CASES,
]
