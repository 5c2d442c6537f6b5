"""Parts of recent models, which the lists of layers and the captured models share.

n: samples, t: tokens, w: width, e: experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.model_parts import Attention, Residual


def mixture(query: Tensor, values: tuple[Tensor, ...]) -> Tensor:
    """Mix values of one shape by attention over depth: a softmax of query · norm(value)."""
    stacked = torch.stack(values)
    scores = F.rms_norm(stacked, query.shape) @ query
    return (scores.softmax(0).unsqueeze(-1) * stacked).sum(0)


class Mixed(nn.Module):
    """Apply a module to a mixture of the outputs of all earlier layers (arXiv 2603.15031)."""

    def __init__(self, width: int, body: nn.Module) -> None:
        super().__init__()
        self.query, self.body = nn.Parameter(torch.randn(width)), body

    def forward(self, *earlier: Tensor) -> Tensor:
        result: Tensor = self.body(mixture(self.query, earlier))
        return result


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 2 * width),
        nn.GELU(),
        nn.Linear(2 * width, width),
        nn.Dropout(0.1),
    )


def block(width: int) -> nn.Sequential:
    attention = Residual(nn.LayerNorm(width), Attention(width, 2))
    return nn.Sequential(attention, Residual(mlp(width)))


class Patches(nn.Module):
    """Images of a batch to patches: {"images": (n, 2, 8, 8)} -> (n, 4, w)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, width, 4, 4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.convolution(batch["images"]).flatten(2).transpose(1, 2)


class WordsAfterPatches(nn.Module):
    """Embed the words of a batch, and put them after the patches: -> (n, 4 + t, w)."""

    def __init__(self, num_words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, width)

    def forward(self, batch: dict[str, Tensor], patches: Tensor) -> Tensor:
        return torch.cat([patches, self.embedding(batch["ids"])], 1)


class Deepstack(nn.Module):
    """A decoder block that also adds a feature of the encoder to the places of the patches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block, self.merger = block(width), nn.Linear(width, width)

    def forward(self, x: Tensor, feature: Tensor) -> Tensor:
        x, merged = self.block(x), self.merger(feature)
        return torch.cat([x[:, : merged.shape[1]] + merged, x[:, merged.shape[1] :]], 1)


class Ahead(nn.Module):
    """Predict one token further ahead, from the state before and the embedding of that token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.joined, self.block = nn.Linear(2 * width, width), block(width)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        """Keep the tokens that have a next one: (n, t, w), (n, t, w) -> (n, t - 1, w)."""
        state, following = self.norms[0](x[:, :-1]), self.norms[1](embedded[:, -x.shape[1] + 1 :])
        result: Tensor = self.block(self.joined(torch.cat([state, following], 2)))
        return result


class Unembedding(nn.Module):
    """The scores of several states, all by one weight."""

    def __init__(self, width: int, num_words: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_words, width))

    def forward(self, *states: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.linear(state, self.weight) for state in states)


class Experts(nn.Module):
    """Send each token to two of the experts; return the auxiliary loss of the router, too."""

    def __init__(self, width: int, num_experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(mlp(width) for _ in range(num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (n, t, w), and (n): the load times the probability of each expert, summed."""
        probabilities = self.router(x).softmax(-1)
        gates, chosen = probabilities.topk(2)
        result = x
        for number, expert in enumerate(self.experts):
            sample, token, which = (chosen == number).nonzero(as_tuple=True)
            output = expert(x[sample, token]) * gates[sample, token, which].unsqueeze(1)
            result = result.index_put((sample, token), output.to(x.dtype), accumulate=True)
        load = F.one_hot(chosen, len(self.experts)).sum(2).float().mean(1)
        return result, (load * probabilities.float().mean(1)).sum(1)


class ExpertsAfter(nn.Module):
    """The same behind such a layer: the auxiliary losses of both add up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = Experts(width)

    def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        result, loss = self.experts(x)
        return result, before + loss


class ScoresAndLoss(nn.Module):
    """Scores of the tokens, and the auxiliary loss beside them."""

    def __init__(self, width: int, num_words: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, num_words)

    def forward(self, x: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(x), loss
