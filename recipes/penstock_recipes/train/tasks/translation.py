"""Translate from many languages into one."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock_recipes.data.text import (
    PAD,
    BatchPlan,
    EncodedPairs,
    ParallelCorpus,
    Step,
    TextBatch,
    TextPairs,
    TextPart,
    Vocabulary,
    collate,
    encode_part,
    epoch_steps,
    load_names,
    load_parallel,
    train_vocabulary,
)
from penstock_recipes.data.text.scores import sacrebleu
from penstock_recipes.errors import RecipeError
from penstock_recipes.recipe.data_sections import Names, ParallelText, TranslatedSection
from penstock_recipes.recipe.model_sections import TranslationTransformer
from penstock_recipes.recipe.recipe import Recipe
from penstock_recipes.train.weights import Weights, fill
from penstock_recipes.zoo import smoothed_cross_entropy, translation_transformer
from penstock_recipes.zoo.translation.model import TranslationTransformer as Translator

from .language import VOCABULARY, check_vocabulary
from .task import Batch, Measure, Part, Share, Task
from .translated import SCORES, judge, translate

_ROWS_AT_ONCE = 64
"""Held-out samples of a batch."""


class TranslationTask(Task):
    """Translates; a sample is a text with its translation.

    The model maps (source, target so far) to (B, T, words).  Losses are means over real words, so
    that padding does not count in a part, in a step or over replicas.
    """

    unit = "words"
    measures = (Measure("valid_loss", "validation loss", "{:.4f}".format, higher_is_better=False),)

    def __init__(self, recipe: Recipe, section: TranslatedSection) -> None:
        self._recipe, self._section = recipe, section
        self._corpus = open_corpus(section)
        self._vocabulary = self._open_vocabulary()
        self._train = self._encoded(self._corpus.train, "train")
        self._valid = self._encoded(self._corpus.valid, "valid")
        self._test = self._encoded(self._corpus.test, "test")
        sacrebleu()  # refuse a run that could not be scored at its end
        self.num_test = len(self._valid)
        self._plan = BatchPlan(
            tokens_per_step=section.tokens_per_step,
            tokens_per_part=section.tokens_per_part,
            temperature=section.temperature,
            seed=recipe.train.seed,
        )
        self._steps: tuple[int, list[Step]] = (-1, [])
        self._fewest_rows = 1

    def _open_vocabulary(self) -> Vocabulary:
        section = self._section
        if section.vocabulary:
            return Vocabulary.load(Path(section.vocabulary))
        return train_vocabulary(
            self._corpus.train,
            section.vocabulary_size,
            temperature=section.temperature,
            seed=section.seed,
        )

    def _encoded(self, part: TextPart, name: str) -> EncodedPairs:
        encoded = encode_part(
            part,
            self._vocabulary,
            max_length=self._section.max_length,
            too_long=self._section.too_long,
        )
        if not len(encoded):
            raise RecipeError(
                f"no text of at most {self._section.max_length} tokens is in the part {name!r} of "
                f"{self._corpus}; give files for it, or a larger data.held_out_share or "
                "data.max_length"
            )
        return encoded

    def check(self, num_replicas: int) -> None:
        self._fewest_rows = num_replicas

    def remarks(self) -> Iterator[str]:
        yield str(self._corpus)
        for what, counts in (
            ("empty on one side, or to be judged by too", self._corpus.num_skipped),
            ("too long to learn from", self._train.num_dropped),
            ("too long to be judged by", self._valid.num_dropped),
            ("too long to be tested", self._test.num_dropped),
        ):
            if total := sum(counts.values()):
                yield f"left out since they are {what}: {total:,} pairs"

    @cached_property
    def data_digest(self) -> str:
        return corpus_digest(self._corpus)

    def begin(self, folder: Path) -> None:
        """Write the vocabulary to the run folder; a resumed run must have the same."""
        super().begin(folder)
        self._vocabulary.save(folder / VOCABULARY)

    def check_start(self, folder: Path) -> None:
        check_vocabulary(self._vocabulary, folder)

    def is_made(self, folder: Path) -> bool:
        return (folder / SCORES).is_file()

    def make_model(self) -> Translator:
        section = self._recipe.model
        if not isinstance(section, TranslationTransformer):
            raise RecipeError(
                f'model.name = "{section.name}" is not made for data.name = '
                f'"{self._section.name}"; choose translation_transformer'
            )
        return translation_transformer(
            **section.options(),
            num_words=self._vocabulary.size,
            max_length=self._section.max_length,
            pad=PAD,
        )

    def example(self, num_samples: int) -> tuple[Tensor, Tensor]:
        batch = collate(self._train, torch.arange(min(num_samples, len(self._train))))
        return batch.source_BS, batch.target_in_BT

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return smoothed_cross_entropy(outputs, targets, self._recipe.train.label_smoothing, PAD)

    @staticmethod
    def reduction(targets: Tensor) -> Tensor:
        """Count the real words of a micro-batch, the denominator of its mean loss."""
        return (targets != PAD).sum()

    def num_steps(self, epoch: int) -> int:
        return len(self._steps_of(epoch))

    def _steps_of(self, epoch: int) -> list[Step]:
        if self._steps[0] != epoch:
            lengths, languages = self._train.lengths_N2, self._train.languages_N
            self._steps = (epoch, epoch_steps(lengths, languages, self._plan, epoch))
        return self._steps[1]

    def batches(self, epoch: int, first: int, share: Share) -> Iterator[Batch]:
        for step in self._steps_of(epoch)[first:]:
            parts = [self._with_rows(collate(self._train, samples)) for samples in step]
            counts = [part.num_target_tokens for part in parts]
            total = sum(counts)
            yield Batch(
                [
                    Part(
                        (part.source_BS[rows], part.target_in_BT[rows]),
                        part.target_out_BT[rows],
                        count / total,
                    )
                    for part, count in zip(parts, counts, strict=True)
                    for rows in [share(len(part.source_BS))]
                ],
                total,
                is_full=len(step) == self._plan.parts_per_step,
            )

    def _with_rows(self, batch: TextBatch) -> TextBatch:
        """Add rows of padding targets, which do not count, until there is one per replica."""
        missing = self._fewest_rows - len(batch.source_BS)
        if missing <= 0:
            return batch
        source, target_in, target_out = (
            torch.cat([t, t[:1].expand(missing, -1)])
            for t in (batch.source_BS, batch.target_in_BT, batch.target_out_BT)
        )
        target_out[-missing:] = PAD
        return TextBatch(source, target_in, target_out)

    def tests(self, samples: Sequence[int]) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
        for chosen in torch.tensor(samples).split(_ROWS_AT_ONCE):
            batch = collate(self._valid, chosen)
            yield (batch.source_BS, batch.target_in_BT), batch.target_out_BT

    def tally(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses_BT = F.cross_entropy(
            outputs.mT.float(), targets, reduction="none", ignore_index=PAD
        )
        words_B = (targets != PAD).sum(dim=1)
        return torch.stack([losses_BT.to(torch.float64).sum(dim=1), words_B], dim=1)

    def scores(self, totals: Sequence[float]) -> Mapping[str, float]:
        return {"valid_loss": totals[0] / totals[1]}

    def predict(self, model: nn.Module, inputs: Sequence[str]) -> Iterator[str]:
        """Yield the translation of each text; with several languages a text is "de: Haus".

        Raises:
            ConfigError: a text is too long, or its language is none of the vocabulary's.
            RecipeError: there is no text, or it has no language.
        """
        if not inputs:
            raise RecipeError('give the texts to translate, or "-" for lines of standard input')
        texts = [self._with_language(text) for text in inputs]
        part = {
            language: TextPairs.of((text, "") for own, text in texts if own == language)
            for language, _ in texts
        }
        encoded = encode_part(part, self._vocabulary, max_length=self._section.max_length)
        assert isinstance(model, Translator)
        translations = self._translated(model, encoded)
        in_order = {language: iter(own) for language, own in translations.items()}
        for language, _ in texts:
            yield next(in_order[language])

    def _with_language(self, text: str) -> tuple[str, str]:
        """Split a text into its language and itself."""
        languages = self._vocabulary.languages
        language, colon, rest = (word.strip() for word in text.partition(":"))
        if colon and language in languages:
            return language, rest
        if len(languages) == 1:
            return languages[0], text
        few = ", ".join(languages[:10]) + (", ..." if len(languages) > 10 else "")
        raise RecipeError(
            f"{text!r} does not say its language; write {languages[0]}: before it (of {few})"
        )

    def _translated(self, model: Translator, encoded: EncodedPairs) -> Mapping[str, Sequence[str]]:
        section = self._section
        return translate(
            model,
            encoded,
            self._vocabulary,
            beam=section.beam,
            length_penalty=section.length_penalty,
        )

    def finish(self, weights: Weights, folder: Path) -> str:
        """Translate the test texts; write translations.tsv, scores.txt, scores.json."""
        model = self.make_model().eval()
        fill(model, weights)
        return judge(self._translated(model, self._test), self._test, self._corpus, folder)


def corpus_digest(corpus: ParallelCorpus) -> str:
    """Return a digest of all texts."""
    digest = hashlib.blake2b(digest_size=32)
    for part in (corpus.train, corpus.valid, corpus.test):
        for language, pairs in part.items():
            digest.update(repr((language, len(pairs))).encode())
            for text in (*pairs.sources, *pairs.targets):
                digest.update(text.encode() + b"\n")
    return digest.hexdigest()


def open_corpus(section: TranslatedSection) -> ParallelCorpus:
    """Read the parallel text of a recipe.

    Raises:
        ConfigError: the text is not there, or cannot be read.
    """
    match section:
        case ParallelText():
            return load_parallel(
                Path(section.path),
                section.languages or None,
                target=section.target,
                held_out_share=section.held_out_share,
                seed=section.seed,
            )
        case Names():
            options = {"languages": section.languages} if section.languages else {}
            return load_names(
                **options,
                kinds=section.kinds,
                most_pairs=dict.fromkeys(section.low_resource, section.low_resource_pairs),
                held_out_share=section.held_out_share,
                seed=section.seed,
            )
