"""Models of 2026: values that skip many blocks, and losses beside the output."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import one_hot

from tests.model.recent import Ahead, block, mixture, mlp

from .made import DECODER, NUM_WORDS, AnyModel, Made, Sizes, numbers, words

WIDTH, NUM_EXPERTS, NUM_PATCHES = 8, 3, 16
IMAGE, START = NUM_WORDS - 1, NUM_WORDS - 2
"""The words that stand for a part of an image, and for its start."""
SEEING: Sizes = {"depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2}
SEEING |= {"patch_size": 4, "temporal_patch_size": 1, "out_hidden_size": 32}
SEEING |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
ROTATED: Sizes = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}


class AttentionResiduals(nn.Module):
    """Each block reads a mixture of all earlier outputs, computed between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(NUM_WORDS, WIDTH), nn.Linear(WIDTH, NUM_WORDS)
        self.blocks = nn.ModuleList(mlp(WIDTH) for _ in range(5))
        self.queries = nn.Parameter(torch.randn(6, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        earlier = [self.embed(x)]
        for query, part in zip(self.queries, self.blocks, strict=False):
            earlier.append(part(mixture(query, tuple(earlier))))
        return self.head(mixture(self.queries[-1], tuple(earlier)))


class TokensAhead(nn.Module):
    """Heads for the next three tokens; the embedding serves them all, and so do its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(NUM_WORDS, WIDTH), nn.Linear(WIDTH, NUM_WORDS)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList([block(WIDTH), block(WIDTH)])
        self.ahead = nn.ModuleList([Ahead(WIDTH), Ahead(WIDTH)])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        state = self.embed(x)
        for part in self.blocks:
            state = part(state)
        scores = [self.head(state)]
        for part in self.ahead:
            state = part(state, self.embed(x))
            scores.append(self.head(state))
        return tuple(scores)


class Routed(nn.Module):
    """Experts for each token, and the auxiliary loss of the router over the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(mlp(WIDTH) for _ in range(NUM_EXPERTS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.router(x).softmax(-1)
        gates, chosen = probabilities.max(-1)
        result = x.clone()
        for number, expert in enumerate(self.experts):
            taken = chosen == number
            result[taken] += expert(x[taken]) * gates[taken].unsqueeze(1)
        load = one_hot(chosen, NUM_EXPERTS).float().mean((0, 1))
        return result, (load * probabilities.mean((0, 1))).sum() * NUM_EXPERTS


class Mixture(nn.Module):  # the losses of the routers are beside the scores
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(NUM_WORDS, WIDTH), nn.Linear(WIDTH, NUM_WORDS)
        self.blocks = nn.ModuleList(Routed() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state, losses = self.embed(x), []
        for part in self.blocks:
            state, loss = part(state)
            losses.append(loss)
        return self.head(state), torch.stack(losses).sum()


class PerSample(nn.Module):
    """Takes patches as (samples, patches, values); the model takes the patches of all in a row."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, **others: Any) -> Any:
        return self.model(pixel_values=pixel_values.flatten(0, 1), **others)


class Forgetful(transformers.Qwen3VLModel):
    """Keeps no offsets for generation, as the error of a capture advises."""

    rope_deltas = property(lambda self: None, lambda self, value: None)


def qwen3_vl() -> Made:
    text = {**DECODER, "num_hidden_layers": 3, "rope_parameters": ROTATED}
    options: Sizes = {"image_token_id": IMAGE, "vision_start_token_id": START}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=SEEING, **options)

    def inputs(batch: int) -> dict[str, Any]:
        said = words(batch, 5).clamp(max=START - 1)
        shown = torch.full((batch, 1 + NUM_PATCHES // 4), IMAGE)
        shown[:, 0] = START
        ids = torch.cat([said[:, :2], shown, said[:, 2:]], 1)
        of_images = {"image_grid_thw": torch.tensor([[1, 4, 4]] * batch)}
        of_images |= {"pixel_values": numbers(NUM_PATCHES, 48)(batch)}
        return {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int(), **of_images}

    made = transformers.Qwen3VLForConditionalGeneration(config)
    made.model.__class__ = Forgetful
    return PerSample(made), inputs


RECENT = (
    AnyModel(
        "attention residuals",
        lambda: (AttentionResiduals(), words),
        "each block reads a mixture of all earlier outputs",
    ),
    AnyModel("qwen3-vl", qwen3_vl, "features of the encoder go to several layers of the decoder"),
    AnyModel("tokens ahead", lambda: (TokensAhead(), words), "heads that share a tied embedding"),
    AnyModel("mixture of experts", lambda: (Mixture(), words), "a loss of routers in the output"),
)
