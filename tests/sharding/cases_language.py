"""Modules of language networks that the fuzz divides."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.alpa_paper.gshard import gshard_moe
from penstock.costs.counting.opaque_modules import OPAQUE, opaque_module
from tests.sharding.fuzz import Case


class OwnAttention(nn.Module):
    """Causal attention by products and a softmax, with dropout on its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.output = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, 4, -1).transpose(1, 2) for part in self.qkv(x).split(8, 2)
        )
        scores = query @ key.transpose(-2, -1) / math.sqrt(2)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = F.dropout(scores.masked_fill(later, -1e9).softmax(-1), 0.2, self.training)
        mixed = (weights @ value).transpose(1, 2).reshape(batch, length, width)
        return x + F.dropout(self.output(mixed), 0.1, self.training)


class Attends(nn.Module):
    """Attention of torch: 4 heads look at as many or at fewer, in all its variants."""

    def __init__(
        self,
        *,
        causal: bool = False,
        num_others: int = 4,
        mask: str = "",
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.query, self.output = nn.Linear(8, 8), nn.Linear(8, 8)
        self.key_value = nn.Linear(8, 4 * num_others)
        self.slope = nn.Parameter(torch.ones(4, 1, 1))
        self.causal, self.mask, self.num_others = causal, mask, num_others
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (4, -1)).transpose(1, 2)
        both = self.key_value(x).unflatten(-1, (2, self.num_others, -1)).permute(2, 0, 3, 1, 4)
        key, value = both.unbind(0)
        places = torch.arange(x.shape[1])
        apart = (places[:, None] - places).abs()
        mask: Tensor | None = None
        if self.mask == "bias":
            mask = -self.slope * apart.to(x.dtype)
        if self.mask == "bool":
            mask = apart < x.shape[1] - 1
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
            enable_gqa=self.num_others < 4,
        )
        return x + self.output(attended.transpose(1, 2).flatten(2)) * self.slope.mean()


class Products(nn.Module):
    """Products of all kinds of shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(8, 6))
        self.vector, self.bias = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        wide = x @ self.matrix
        one = wide @ self.vector
        left = self.vector @ wide.mT
        each = torch.baddbmm(self.bias, x, self.matrix.expand(len(x), -1, -1))
        flat = torch.addmm(self.bias, x.reshape(-1, 8), self.matrix).view(each.shape)
        batched = torch.matmul(x[:, None], torch.stack((self.matrix, self.matrix.cos()))).sum(1)
        mixed = torch.einsum("btk,kn,n->btn", x, self.matrix, self.vector)
        dotted = torch.einsum("...tk,...sk->...ts", x, mixed[..., :1].expand_as(x))
        every = each * flat + batched + mixed + (one * left)[..., None]
        return torch.cat((every, dotted.sum(-1, keepdim=True)), -1)


class Picks(nn.Module):
    """What is picked, moved, repeated and summed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        best = x.argmax(-1, keepdim=True)
        top, where = x.topk(2, -1)
        hot = F.one_hot(where[..., 0], 8).to(x.dtype)
        picked = x.gather(2, best) + x.select(2, 0).unsqueeze(-1) * top.sum(-1, keepdim=True)
        rows = (
            self.table[best.squeeze(-1) % 5] + self.table.index_select(0, where.flatten() % 5)[:1]
        )
        spread = torch.zeros_like(x).scatter(2, where, top) + hot.cumsum(1).tril()
        halves = x.narrow(2, 0, 4), x[..., 4:]
        turned = torch.cat((-halves[1], halves[0]), dim=-1)
        many = (
            x.repeat_interleave(2, 1).unflatten(1, (-1, 2)).mean(2) + x.repeat(1, 1, 2)[..., 4:12]
        )
        normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        first, second = torch.chunk(normal * turned, 2, -1)
        allowed = (x > 0) & ~(x > 1)
        kept = x.masked_fill(allowed[:, :1], 0.5).type_as(x)
        grid = x[:, torch.arange(2)[:, None], torch.arange(3)].mean((1, 2))[:, None, None]
        return (
            picked
            + rows
            + spread
            + many
            + torch.cat((second, first), 2)
            + kept
            + grid
            + top.amax()
        )


class Mixture(nn.Module):
    """Experts of which each position takes two, by a table of who goes where (GShard)."""

    def __init__(
        self, experts: int = 4, places: int = 3, width: int = 8, ff_width: int = 6
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, ff_width))
        self.down = nn.Parameter(torch.randn(experts, ff_width, width))
        self.places = places

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        _, best = gates.topk(2, dim=-1)
        num_experts = gates.shape[-1]
        combine, taken = torch.zeros(()), torch.zeros(())
        for number in range(2):
            mine = F.one_hot(best[..., number], num_experts).to(x.dtype)
            place = mine.cumsum(1) - mine
            place = place + taken
            taken = mine.sum(1, keepdim=True)
            kept = mine * (place < self.places).to(x.dtype)
            own = (place * kept).sum(-1).long().clamp(max=self.places - 1)
            slots = F.one_hot(own, self.places).to(x.dtype)
            share = (gates * kept).unsqueeze(-1) * slots.unsqueeze(-2)
            combine = combine + share
        given = torch.einsum("gtec,gtm->egcm", (combine > 0).to(x.dtype), x)
        rows = given.reshape(num_experts, -1, x.shape[-1])
        found = torch.bmm(torch.bmm(rows, self.up).relu(), self.down).reshape(given.shape)
        return x + torch.einsum("gtec,egcm->gtm", combine, found)


class Makes(nn.Module):
    """What is drawn, or made of one number, beside a tensor: of its shape, or of another."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        drawn = torch.rand_like(x) * x + torch.randn_like(x) + torch.randint_like(x, 3, 9)
        steps = x.new_full((len(x), 1, 8), 0.5) * x.new_ones(x.shape[1], 1)
        longer = torch.cat((x, x.new_zeros(len(x), 2, 8)), 1).cumsum(1)
        return drawn * steps + longer[:, 2:] + torch.full_like(x, 2.0) * x.new_zeros(size=(8,))


class GShardBlock(nn.Module):
    """The zoo's block with experts, which gives what it computes and its balance loss."""

    def __init__(self, width: int = 8, num_experts: int = 4, capacity_factor: float = 0.7) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"width": width, "num_experts": num_experts, "num_words": 16}
        sizes |= {"num_layers": 2, "num_heads": 4, "capacity_factor": capacity_factor}
        self.block = gshard_moe(**sizes, dropout=0.2).blocks[1]

    def forward(self, x: Tensor) -> Tensor:
        found, balance = self.block(x)
        return found * (1 + balance)


class SparseExperts(nn.Module):
    """Experts that loop over the positions that they are given, as those of Mixtral."""

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 12, 8))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 6))

    def forward(self, x: Tensor, which: Tensor, shares: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for number in which.unique():
            token, place = torch.where(which == number)
            gate, wide = F.linear(x[token], self.gate_up_proj[number]).split(6, -1)
            found = F.linear(self.act_fn(gate) * wide, self.down_proj[number])
            result.index_add_(0, token, found * shares[token, place, None])
        return result


_MIXTRAL = OPAQUE["transformers.models.mixtral.modeling_mixtral.MixtralExperts"]
opaque_module(replace(_MIXTRAL, name=f"{__name__}.SparseExperts"))


class Sparse(nn.Module):
    """Experts of which each position takes two, and their own loop over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4, bias=False), SparseExperts()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 8)
        shares, which = self.gate(rows).softmax(-1).topk(2, -1)
        shares /= shares.sum(-1, keepdim=True)
        return x + self.experts(rows, which, shares).view(x.shape)


SHAPE, OTHERS = (4, 6, 8), ((3, 5, 8), (1, 4, 8))
CASES = [
    Case("own attention", OwnAttention, SHAPE, OTHERS),
    Case("causal attention", partial(Attends, causal=True), SHAPE, OTHERS),
    Case(
        "causal attention in groups",
        partial(Attends, causal=True, num_others=2, dropout=0.0),
        SHAPE,
        OTHERS,
    ),
    Case("attention in groups", partial(Attends, num_others=2, mask="bool"), SHAPE, OTHERS),
    Case("attention with a bias", partial(Attends, mask="bias"), SHAPE, OTHERS),
    Case("products", Products, SHAPE, OTHERS),
    Case("picks", Picks, SHAPE, OTHERS),
    Case("mixture", Mixture, SHAPE, OTHERS),
    Case("makes", Makes, SHAPE, OTHERS),
    Case("gshard block", GShardBlock, SHAPE, OTHERS),
    Case("sparse experts", Sparse, SHAPE, OTHERS),
]
