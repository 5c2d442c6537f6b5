"""Predict the next token of a text."""

import hashlib
import math
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.errors import CheckpointError
from penstock_recipes.data import batch_indices, epoch_order, keyed_generator
from penstock_recipes.data.text import (
    ByteVocabulary,
    TextSplit,
    TextVocabulary,
    Vocabulary,
    load_text,
    text_windows,
    train_text_vocabulary,
)
from penstock_recipes.errors import RecipeError
from penstock_recipes.recipe.data_sections import Text
from penstock_recipes.recipe.model_sections import Gpt
from penstock_recipes.recipe.recipe import Recipe
from penstock_recipes.train.layout import num_batches, smallest_microbatch
from penstock_recipes.train.run_files import replace_text
from penstock_recipes.train.weights import Weights, fill
from penstock_recipes.zoo import gpt

from .task import Batch, Measure, Part, Share, Task

SAMPLE = "sample.txt"


class LanguageTask(Task):
    """Predicts the next token of each window of a text.  The model returns (B, T, tokens).

    With `shapes_only` no text is read: one batch of a made-up text and a vocabulary of the right
    size stand in.
    """

    measures = (
        Measure("valid_perplexity", "perplexity", "{:.3f}".format, higher_is_better=False),
        Measure("valid_loss", "validation loss", "{:.4f}".format, higher_is_better=False),
    )

    def __init__(self, recipe: Recipe, section: Text, *, shapes_only: bool = False) -> None:
        self._recipe, self._section = recipe, section
        self._vocabulary: TextVocabulary = ByteVocabulary(section.vocabulary_size)
        if section.vocabulary:
            self._vocabulary = Vocabulary.load(Path(section.vocabulary))
        if shapes_only:
            length = recipe.batch_size * section.length + 1
            text = (string.printable * (length // len(string.printable) + 1))[:length]
            split = TextSplit(text, text)
            self._vocabulary = ByteVocabulary(self._vocabulary.size)
        else:
            split = load_text(Path(section.path), section.valid_share)
            if not section.vocabulary and section.vocabulary_size > 256:
                self._vocabulary = train_text_vocabulary(split.train, section.vocabulary_size)
        self._train = text_windows(split.train, self._vocabulary, section.length)
        self._valid = text_windows(split.valid, self._vocabulary, section.length)
        self._prompt = section.prompt or split.valid[: max(1, section.length // 4)]
        self._digest = hashlib.blake2b((split.train + split.valid).encode()).hexdigest()
        self.num_test = len(self._valid)

    def check(self, num_replicas: int) -> None:
        smallest_microbatch(self._recipe, len(self._train))

    @property
    def data_digest(self) -> str:
        return self._digest

    def begin(self, folder: Path) -> None:
        super().begin(folder)
        if isinstance(self._vocabulary, Vocabulary):
            self._vocabulary.save(folder / VOCABULARY)

    def check_start(self, folder: Path) -> None:
        if isinstance(self._vocabulary, Vocabulary):
            check_vocabulary(self._vocabulary, folder)

    def is_made(self, folder: Path) -> bool:
        return not self._section.sample_length or (folder / SAMPLE).is_file()

    def make_model(self) -> nn.Module:
        section = self._recipe.model
        if not isinstance(section, Gpt):
            raise RecipeError(
                f'model.name = "{section.name}" is not made for data.name = "text"; choose gpt'
            )
        return gpt(
            **section.options(), num_words=self._vocabulary.size, max_length=self._section.length
        )

    def example(self, num_samples: int) -> Tensor:
        return self._train.batch(torch.arange(min(num_samples, len(self._train))))[0]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        smoothing = self._recipe.train.label_smoothing
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), label_smoothing=smoothing)

    def num_steps(self, epoch: int) -> int:
        return num_batches(self._recipe, len(self._train))

    def batches(self, epoch: int, first: int, share: Share) -> Iterator[Batch]:
        size = self._recipe.batch_size
        order = epoch_order(len(self._train), self._recipe.train.seed, epoch)
        for number in range(first, self.num_steps(epoch)):
            whole = batch_indices(order, number, size)
            part = Part(*self._train.batch(whole[share(len(whole))]))
            yield Batch([part], len(whole), is_full=len(whole) == size)

    def tests(self, samples: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.tensor(samples).split(self._recipe.batch_size):
            yield self._valid.batch(chosen)

    def tally(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses_BT = F.cross_entropy(outputs.mT.float(), targets, reduction="none")
        sums_B = losses_BT.to(torch.float64).sum(dim=1)
        return torch.stack([sums_B, torch.full_like(sums_B, targets.shape[1])], dim=1)

    def scores(self, totals: Sequence[float]) -> Mapping[str, float]:
        loss = totals[0] / totals[1]
        return {"valid_perplexity": math.exp(min(loss, 700.0)), "valid_loss": loss}

    def finish(self, weights: Weights, folder: Path) -> str:
        """Generate text from the prompt, and write it to sample.txt."""
        if not self._section.sample_length:
            return ""
        model = self.make_model().eval()
        fill(model, weights)
        (text,) = self.predict(model, ())
        replace_text(folder / SAMPLE, text + "\n")
        return f"{folder / SAMPLE} begins:\n\n{text[:1000]}\n"

    def predict(self, model: nn.Module, inputs: Sequence[str]) -> Iterator[str]:
        """Yield each text with its continuation; without inputs, that of the recipe's prompt."""
        for prompt in inputs or [self._prompt]:
            if not prompt:
                raise RecipeError("an empty text cannot be continued; give its first words")
            yield self._generate(model, prompt)

    def _generate(self, model: nn.Module, prompt: str) -> str:
        (ids,) = self._vocabulary.encode([prompt])
        generator = keyed_generator(self._recipe.train.seed, "sample")
        with torch.no_grad():
            for _ in range(self._section.sample_length):
                logits_V = model(torch.tensor([ids[-self._section.length :]]))[0, -1]
                shares_V = (logits_V / self._section.sample_temperature).softmax(0)
                ids.append(int(torch.multinomial(shares_V, 1, generator=generator)))
        return self._vocabulary.decode(ids)


VOCABULARY = "vocabulary.json"


def check_vocabulary(vocabulary: Vocabulary, folder: Path) -> None:
    """Refuse the weights of the run in `folder` if it used another vocabulary.

    Raises:
        CheckpointError: it used another vocabulary, or saved none.
    """
    path = folder / VOCABULARY
    if not path.is_file():
        raise CheckpointError(
            f"{path} is not there, so that nobody knows what the weights' tokens mean; put the "
            "vocabulary of that run beside its checkpoints"
        )
    other = Vocabulary.load(path)
    vocabulary.check_fits(size=other.size, digest=other.digest)
