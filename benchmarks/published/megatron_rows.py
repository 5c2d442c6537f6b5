"""The rows of megatron_a100.tsv: GPT by Megatron-LM of 2021, and what is predicted for them.

Shapes: B sequences, T positions, H heads, C channels of a head, D = H C channels between blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.automatic.scaling import part_of
from penstock.costs.cluster import Cluster

from .layouts import rows_of, step_s

FILE = Path(__file__).with_name("megatron_a100.tsv")
NUM_WORDS, LENGTH = 51_200, 2048
"""By the paper, section 5.1."""
_DROPOUT = 0.1
"""Megatron-LM's default."""


class Block(nn.Module):
    """Attention of products and a softmax, then an MLP: (B, T, D) -> (B, T, D); with dropout."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Attend, then transform each token; both are added to the input."""
        q_BHTC, k_BHTC, v_BHTC = (
            each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for each in self.inputs(self.norm1(x_BTD)).chunk(3, -1)
        )
        scores_BHTS = q_BHTC * q_BHTC.shape[-1] ** -0.5 @ k_BHTC.transpose(2, 3)
        heads_BHTC = F.dropout(F.softmax(scores_BHTS, -1), _DROPOUT) @ v_BHTC
        attended_BTD = self.out(heads_BHTC.transpose(1, 2).flatten(2))
        x_BTD = x_BTD + F.dropout(attended_BTD, _DROPOUT)
        inner_BTD = F.gelu(self.up(self.norm2(x_BTD)))
        return x_BTD + F.dropout(self.down(inner_BTD), _DROPOUT)


class Embedding(nn.Module):
    """Words and positions: (B, T) -> (B, T, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(NUM_WORDS, width), nn.Embedding(LENGTH, width)

    def forward(self, words_BT: Tensor) -> Tensor:
        """Add both embeddings."""
        places_T = torch.arange(words_BT.shape[1], device=words_BT.device)
        embedded_BTD: Tensor = self.words(words_BT) + self.positions(places_T)
        return embedded_BTD


def _loss(logits_BTV: Tensor, words_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), words_BT.flatten())


@dataclass(frozen=True)
class Row:
    """The rate that Megatron-LM reached for a model on a number of devices."""

    fields: dict[str, str]

    def number(self, name: str) -> int:
        """Return a column that holds a whole number."""
        return int(self.fields[name])

    @property
    def measured_s(self) -> float:
        """Seconds of the step, by the paper's count of FLOPs."""
        layers, width, batch = map(self.number, ("layers", "width", "batch"))
        more = 1 + LENGTH / (6 * width) + NUM_WORDS / (16 * layers * width)
        flops = 96 * batch * LENGTH * layers * width**2 * more
        return flops / self.number("gpus") / (float(self.fields["TFLOPS"]) * 1e12)

    @property
    def layout(self) -> penstock.Parallelism:
        """The layout of devices and layers."""
        tensor, pipeline, each, size = map(self.number, ("tp", "pp", "vl", "mbs"))
        rows = self.number("gpus") // (tensor * pipeline)
        return penstock.Parallelism(
            tensor=tensor,
            pipeline=pipeline,
            data=rows,
            virtual=self.number("layers") // (pipeline * each) if each else 1,
            microbatch_size=size,
            num_microbatches=self.number("batch") // (rows * size),
            recompute="layers",
        )

    def predicted_s(self) -> float:
        """Return the seconds of the step of the same layout."""
        layout, width = self.layout, self.number("width")
        with torch.device("meta"):
            blocks = (Block(width, self.number("heads")) for _ in range(self.number("layers")))
            head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, NUM_WORDS, bias=False))
            model = nn.Sequential(Embedding(width), *blocks, head).bfloat16()
            words = torch.zeros(layout.microbatch_size * (layout.data or 1), LENGTH).long()
        profile = penstock.profile(model, words, loss=_loss, targets=words, measure=False)
        cluster = part_of(Cluster.load("dgx-a100"), self.number("gpus"))
        return step_s(profile, cluster, layout)


def rows() -> Iterator[Row]:
    """Yield the rows of the table."""
    yield from map(Row, rows_of(FILE))
