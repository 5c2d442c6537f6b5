"""Small translation models on real names, trained for a minute: what three benchmarks share."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

from penstock import Pipeline, Recompute, capture, clip_grad_norm_
from penstock_recipes.data.text import (
    PAD,
    BatchPlan,
    EncodedPairs,
    ParallelCorpus,
    Scores,
    Step,
    Vocabulary,
    collate,
    encode_part,
    epoch_steps,
    load_names,
    num_real_tokens,
    parts_by_length,
    score_translations,
    train_vocabulary,
)
from penstock_recipes.recipe.optimizer_sections import InverseSqrt
from penstock_recipes.train.learning_rate import learning_rate
from penstock_recipes.train.tasks.translated import kept, translate
from penstock_recipes.zoo import (
    TranslationTransformer,
    smoothed_cross_entropy,
    translation_transformer,
)

HIGH_RESOURCE = ("fr", "de", "cs", "sv", "es", "ru")
LOW_RESOURCE = ("ca", "lb", "sk", "da", "pt", "uk")
"""Each is a relative of the high-resource language in its place."""
PAIRS_OF_LOW = 50
VOCABULARY_SIZE = 1000
LONGEST = 64
HELD_OUT_SHARE = 0.1
TOKENS_JUDGED_AT_ONCE = 2048


@dataclass(frozen=True, slots=True)
class Texts:
    """Names in some languages and in English, as text and as tokens."""

    corpus: ParallelCorpus
    vocabulary: Vocabulary
    train: EncodedPairs
    valid: EncodedPairs
    test: EncodedPairs


@cache
def read_names(high_resource: tuple[str, ...], low_resource: tuple[str, ...] = ()) -> Texts:
    """Read the names; those in `low_resource` keep PAIRS_OF_LOW pairs to learn from each."""
    corpus = load_names(
        (*high_resource, *low_resource),
        most_pairs=dict.fromkeys(low_resource, PAIRS_OF_LOW),
        held_out_share=HELD_OUT_SHARE,
    )
    vocabulary = train_vocabulary(corpus.train, VOCABULARY_SIZE)
    encode = partial(encode_part, vocabulary=vocabulary, max_length=LONGEST, too_long="drop")
    return Texts(
        corpus, vocabulary, encode(corpus.train), encode(corpus.valid), encode(corpus.test)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a model, and what keeps it stable."""

    num_layers: int
    ff_width: int
    num_heads: int
    width: int = 64
    head_width: int = 32
    depth_scaled: bool = True
    logit_clip: float | None = None

    def __str__(self) -> str:
        return f"T({self.num_layers}, {self.ff_width}, {self.num_heads})"

    def model(self, vocabulary: Vocabulary, seed: int) -> TranslationTransformer:
        """Make the model; its weights depend on `seed`."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            return translation_transformer(
                self.num_layers,
                self.ff_width,
                self.num_heads,
                num_words=vocabulary.size,
                width=self.width,
                head_width=self.head_width,
                max_length=2 * LONGEST + 10,
                pad=PAD,
                depth_scaled=self.depth_scaled,
                logit_clip=self.logit_clip,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a model learns; the learning rate rises and falls as the Transformer's."""

    tokens_per_step: int
    tokens_per_part: int
    peak_rate: float
    warmup_steps: int
    seed: int
    most_norm: float = float("inf")
    """The norm that gradients are scaled down to."""
    momentum: float | None = None
    """Of gradient descent; without it, Adam."""

    @property
    def plan(self) -> BatchPlan:
        """How an epoch is cut into steps."""
        return BatchPlan(
            tokens_per_step=self.tokens_per_step,
            tokens_per_part=self.tokens_per_part,
            seed=self.seed,
        )

    def num_steps(self, texts: Texts, epochs: int) -> int:
        """Count the steps of the first epochs."""
        train = texts.train
        return sum(
            len(epoch_steps(train.lengths_N2, train.languages_N, self.plan, epoch))
            for epoch in range(epochs)
        )

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Make the optimizer; each step sets its learning rate."""
        if self.momentum is None:
            return Adam(parameters, betas=(0.9, 0.98))
        return SGD(parameters, lr=self.peak_rate, momentum=self.momentum)

    def rate(self, number: int) -> float:
        """Give the learning rate of step `number` (from 0)."""
        section = InverseSqrt(name="inverse_sqrt", warmup_steps=self.warmup_steps)
        return learning_rate(section, number, peak=self.peak_rate, steps_per_epoch=1, epochs=1)


@dataclass(frozen=True, slots=True)
class Taken:
    """What was seen of one step."""

    step: int
    epochs_done: int
    loss: float
    gradient_norm: float


class Run:
    """One model while it is trained, as a pipeline of one stage.

    What several stages compute is the same to the bit; runs side by side, one for each core, are
    done sooner.
    """

    def __init__(self, texts: Texts, shape: Shape, training: Training) -> None:
        self.texts, self.training = texts, training
        self.model = shape.model(texts.vocabulary, training.seed)
        example = collate(texts.train, torch.arange(2))
        self.pipe = Pipeline(
            capture(self.model, (example.source_BS, example.target_in_BT), check=False),
            num_stages=1,
            loss=smoothed_cross_entropy,
            reduction=num_real_tokens,
            recompute=Recompute.NEVER,
            seed=training.seed,
            threads_per_stage=1,
        )
        self._optimizer = training.optimizer(self.pipe.parameters())

    @property
    def num_parameters(self) -> int:
        """Count the parameters of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def steps(self) -> Iterator[Taken]:
        """Train for as long as one asks for more."""
        for number, (step, epochs_done) in enumerate(self._steps_to_take()):
            self._optimizer.param_groups[0]["lr"] = self.training.rate(number)
            loss = self._gradients(step)
            norm = clip_grad_norm_(self.pipe, self.training.most_norm)
            self._optimizer.step()
            self._optimizer.zero_grad()
            yield Taken(number + 1, epochs_done, loss, float(norm))

    def _steps_to_take(self) -> Iterator[tuple[Step, int]]:
        """Yield steps without end, each with the number of epochs that are done after it."""
        train = self.texts.train
        for epoch in count():
            plan = self.training.plan
            steps = epoch_steps(train.lengths_N2, train.languages_N, plan, epoch)
            yield from ((step, epoch) for step in steps[:-1])
            yield steps[-1], epoch + 1

    def _gradients(self, step: Step) -> float:
        """Add up the gradients of a step, part by part; give the mean loss of its words."""
        parts = [collate(self.texts.train, samples) for samples in step]
        total = sum(part.num_target_tokens for part in parts)
        loss = 0.0
        for part in parts:
            share = part.num_target_tokens / total
            inputs = part.source_BS, part.target_in_BT
            loss += share * float(
                self.pipe.train_step(inputs, part.target_out_BT, loss_scale=share)
            )
        return loss

    def validation_losses(self) -> dict[str, float]:
        """Give the mean negative log-likelihood of a word, by language."""
        samples = self.texts.valid
        sums_N, words_N = torch.zeros(2, len(samples), dtype=torch.float64)
        for rows in parts_by_length(samples.lengths_N2, TOKENS_JUDGED_AT_ONCE):
            batch = collate(samples, rows)
            logits_BTV = self.pipe.eval_step((batch.source_BS, batch.target_in_BT))
            losses_BT = cross_entropy(
                logits_BTV.mT, batch.target_out_BT, reduction="none", ignore_index=PAD
            )
            sums_N[rows] = losses_BT.to(torch.float64).sum(dim=1)
            words_N[rows] = (batch.target_out_BT != PAD).sum(dim=1).to(torch.float64)
        by_language = samples.by_language(torch.stack([sums_N, words_N], dim=1).unbind())
        return {language: _ratio(rows) for language, rows in by_language.items()}

    def scores(self) -> Scores:
        """Translate the texts that are held out for testing, word by most probable word."""
        texts = self.texts
        translations = translate(
            self.model, texts.test, texts.vocabulary, beam=1, length_penalty=0.0
        )
        part = kept(texts.test, texts.corpus.test)
        return score_translations(translations, part, target=texts.corpus.target)


def _ratio(rows: Iterable[Tensor]) -> float:
    losses, words = torch.stack(list(rows)).sum(dim=0).tolist()
    return float(losses / words)


def mean_over(languages: Sequence[str], by_language: Mapping[str, float]) -> float:
    """Give the mean over some languages, each counted once."""
    return fmean(by_language[language] for language in languages)
