"""The models that are predicted: transformer blocks, convolutions, AmoebaNet's cells, a GPT."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import penstock
from benchmarks.blocks import conv_net, transformer
from penstock import Profile, capture
from penstock_recipes.zoo import amoebanet_d, gpt

NUM_CLASSES = 10
NUM_WORDS = 512
AUXILIARY_WEIGHT = 0.4
Batch = tuple[Tensor, Tensor]
Loss = Callable[[Any, Tensor], Tensor]


def both_heads(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Weigh the auxiliary head's loss as Real et al. do."""
    main, auxiliary = (cross_entropy(output, labels) for output in outputs)
    return main + AUXILIARY_WEIGHT * auxiliary


def next_words(logits: Tensor, words: Tensor) -> Tensor:
    """Return the loss of a language model."""
    return cross_entropy(logits.flatten(0, 1), words.flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model of a kind and a size, its batch and its loss; equal at every call.

    `kind` is "transformer", "convolution", "AmoebaNet" or "GPT"; `depth` are its blocks or normal
    cells, `width` features, channels or filters, `side` tokens, or pixels of a side.
    """

    kind: str
    depth: int
    width: int
    side: int
    batch: int

    def layers(self) -> Any:
        """Build the model, as a pipeline takes it."""
        if self.kind == "transformer":
            return transformer(self.depth, self.width, 4)
        if self.kind == "convolution":
            return conv_net(self.depth, self.width)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            model: nn.Module = (
                self._gpt()
                if self.kind == "GPT"
                else amoebanet_d(
                    self.depth, self.width, num_classes=NUM_CLASSES, image_size=self.side
                )
            )
        return capture(model, self.data()[0][:2])

    def _gpt(self) -> nn.Module:
        return gpt(
            num_layers=self.depth,
            width=self.width,
            num_heads=4,
            num_words=NUM_WORDS,
            max_length=self.side,
            dropout=0.0,
            tied=False,
        )

    @property
    def loss(self) -> Loss:
        """Of one micro-batch."""
        if self.kind == "GPT":
            return next_words
        return both_heads if self.kind == "AmoebaNet" else mse_loss

    def data(self) -> Batch:
        """Draw a batch and its targets."""
        generator = torch.Generator().manual_seed(1)
        side, shape = self.side, (self.batch, self.side, self.width)
        if self.kind == "GPT":
            words = torch.randint(NUM_WORDS, (self.batch, side), generator=generator)
            return words, words.roll(-1, 1)
        if self.kind == "transformer":
            inputs, targets = torch.randn((2, *shape), generator=generator)
            return inputs, targets
        images = torch.randn((self.batch, 3, side, side), generator=generator)
        if self.kind == "convolution":
            shape = (self.batch, self.width, side)
            return images, torch.randn((*shape, side), generator=generator)
        return images, torch.randint(NUM_CLASSES, (self.batch,), generator=generator)

    def profile(
        self, num_microbatches: tuple[int, ...], *, busy: bool, threads: int = 1
    ) -> Profile:
        """Measure the layers alone on so many threads, and if `busy` with all cores at it."""
        inputs, targets = self.data()
        return penstock.profile(
            self.layers(),
            inputs,
            loss=self.loss,
            targets=targets,
            microbatch_sizes=[self.batch // count for count in num_microbatches],
            busy=busy,
            threads=threads,
            name=self.kind,
        )


SUBJECTS = (
    Subject(kind="transformer", depth=8, width=192, side=32, batch=64),
    Subject(kind="convolution", depth=9, width=32, side=24, batch=64),
    Subject(kind="AmoebaNet", depth=6, width=32, side=32, batch=64),
)
SMALLEST = (Subject(kind="transformer", depth=8, width=16, side=4, batch=8),)
