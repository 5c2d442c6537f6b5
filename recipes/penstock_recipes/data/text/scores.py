"""Score translations by sacrebleu's BLEU and chrF, by language and on average.

Both compare whole sets of texts, from 0 to 100.  BLEU counts matching runs of one to four words,
chrF matching runs of one to six characters.  Few names have four words, so chrF tells more about
them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from penstock.errors import ConfigError
from penstock.trace.units import columns
from penstock_recipes.data import optional_library

from .corpus import TextPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """BLEU and chrF, from 0 to 100, of translations from one language."""

    bleu: float
    chrf: float
    num_texts: int


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores by language; `str` returns them as a table."""

    by_language: Mapping[str, Score]

    @property
    def mean_bleu(self) -> float:
        """Mean over languages, each counted once."""
        return fmean(score.bleu for score in self.by_language.values())

    @property
    def mean_chrf(self) -> float:
        """Mean over languages, each counted once."""
        return fmean(score.chrf for score in self.by_language.values())

    def only(self, languages: Sequence[str]) -> "Scores":
        """Return the scores of some languages."""
        return Scores({language: self.by_language[language] for language in languages})

    def __str__(self) -> str:
        return compare({"": self})


def score_translations(
    translations: Mapping[str, Sequence[str]], part: TextPart, *, target: str
) -> Scores:
    """Compare translations from each language with the targets of `part`, in the same order.

    target: The language of the translations, which selects BLEU's tokenizer.

    Raises:
        ConfigError: sacrebleu or its tokenizer is not installed, there are no translations, or
            the numbers of texts differ.
    """
    _check_same_texts(translations, part)
    metrics = sacrebleu("sacrebleu.metrics")
    try:
        bleu, chrf = metrics.BLEU(trg_lang=target), metrics.CHRF()
    except (RuntimeError, ImportError) as error:
        raise ConfigError(f"sacrebleu cannot find words in {target!r}: {error}") from None

    def score(language: str) -> Score:
        texts, references = list(translations[language]), [list(part[language].targets)]
        return Score(
            bleu=bleu.corpus_score(texts, references).score,
            chrf=chrf.corpus_score(texts, references).score,
            num_texts=len(texts),
        )

    return Scores({language: score(language) for language in sorted(translations)})


def identity_scores(part: TextPart, *, target: str) -> Scores:
    """Score the sources as translations, the baseline of copying.

    Raises:
        ConfigError: as `score_translations`.
    """
    sources = {language: pairs.sources for language, pairs in part.items()}
    return score_translations(sources, part, target=target)


def compare(systems: Mapping[str, Scores]) -> str:
    """Return a table: a line for each language and one for the mean, columns for each system.

    A system without scores for a language has "-" there; its mean leaves that language out.
    """
    languages = sorted(
        {language for scores in systems.values() for language in scores.by_language}
    )
    titles = (f"{name} {metric}".strip() for name in systems for metric in ("BLEU", "chrF"))
    rows = [["language", "texts", *titles]]
    for language in languages:
        scores_of = [scores.by_language.get(language) for scores in systems.values()]
        texts = next(score.num_texts for score in scores_of if score)
        cells = [cell for score in scores_of for cell in _cells(score)]
        rows.append([language, f"{texts:,}", *cells])
    means = [f"{m:.1f}" for s in systems.values() for m in (s.mean_bleu, s.mean_chrf)]
    rows.append(["mean", "", *means])
    return "\n".join(columns(rows, num_left=1))


def sacrebleu(module: str = "sacrebleu") -> Any:
    """Import sacrebleu, or one of its modules.

    Raises:
        ConfigError: it is not installed.
    """
    return optional_library(module, "scores of translations (BLEU and chrF) needs", "translation")


def _cells(score: Score | None) -> tuple[str, str]:
    return ("-", "-") if score is None else (f"{score.bleu:.1f}", f"{score.chrf:.1f}")


def _check_same_texts(translations: Mapping[str, Sequence[str]], part: TextPart) -> None:
    if not translations:
        raise ConfigError("there are no translations to compare")
    for language, texts in translations.items():
        expected = len(part[language]) if language in part else 0
        if len(texts) != expected:
            raise ConfigError(
                f"there are {len(texts):,} translations from {language!r} and {expected:,} texts "
                "to compare them with; give one for each text"
            )
