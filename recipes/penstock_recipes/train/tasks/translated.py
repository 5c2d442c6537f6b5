"""Translate the test texts with a trained model, and score the translations."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from io import StringIO
from pathlib import Path

from penstock_recipes.data.text import (
    BOS,
    EOS,
    PAD,
    EncodedPairs,
    ParallelCorpus,
    TextPairs,
    TextPart,
    Vocabulary,
    collate,
    compare,
    identity_scores,
    parts_by_length,
    score_translations,
)
from penstock_recipes.train.run_files import replace_text
from penstock_recipes.zoo import beam_search
from penstock_recipes.zoo.translation.model import TranslationTransformer

SCORES = "scores.json"
_TOKENS_AT_ONCE = 2048
"""Source tokens of a batch, padding included; a beam search holds `beam` times as many."""
Translations = Mapping[str, Sequence[str]]
"""Translations by source language."""


def translate(
    model: TranslationTransformer,
    encoded: EncodedPairs,
    vocabulary: Vocabulary,
    *,
    beam: int,
    length_penalty: float,
) -> dict[str, list[str]]:
    """Return the translations of all sources by language, in the order of the pairs."""
    translations = [""] * len(encoded)
    longest = max(_TOKENS_AT_ONCE, int(encoded.lengths_N2.max()))
    for samples in parts_by_length(encoded.lengths_N2, longest):
        batch = collate(encoded, samples)
        words_BT = beam_search(
            model,
            batch.source_BS,
            max_length=min(model.target_embedding.max_length, 2 * batch.source_BS.shape[1] + 10),
            beam=beam,
            length_penalty=length_penalty,
            bos=BOS,
            eos=EOS,
            pad=PAD,
        ).best_BT
        for sample, row in zip(samples.tolist(), words_BT.tolist(), strict=True):
            translations[sample] = vocabulary.decode(word for word in row if word != PAD)
    return encoded.by_language(translations)


def judge(
    translations: Translations, encoded: EncodedPairs, corpus: ParallelCorpus, folder: Path
) -> str:
    """Score the translations, and plain copies of the sources; write scores and texts.

    Returns:
        The mean scores, and the names of the files.
    """
    part = kept(encoded, corpus.test)
    systems = {
        "copy": identity_scores(part, target=corpus.target),
        "model": score_translations(translations, part, target=corpus.target),
    }
    # Write the texts, the table of scores, and the scores as JSON.
    table = compare(systems)
    lines = [
        _quoted(language, source, reference, translation)
        for language, pairs in part.items()
        for source, reference, translation in zip(
            pairs.sources, pairs.targets, translations[language], strict=True
        )
    ]
    replace_text(folder / "translations.tsv", "\n".join(lines) + "\n")
    replace_text(folder / "scores.txt", table + "\n")
    by_language = {
        name: {language: asdict(score) for language, score in scores.by_language.items()}
        for name, scores in systems.items()
    }
    replace_text(folder / SCORES, json.dumps(by_language, indent=1) + "\n")
    ends = [line for n, line in enumerate(table.splitlines()) if n == 0 or line[:4] == "mean"]
    return "\n".join([*ends, f"by language: {folder / 'scores.txt'}; texts in translations.tsv"])


def kept(encoded: EncodedPairs, part: TextPart) -> dict[str, TextPairs]:
    """Return the texts of the encoded pairs, without those that were too long."""
    positions = encoded.by_language(encoded.positions_N.tolist())
    return {
        language: TextPairs.of(
            (part[language].sources[n], part[language].targets[n]) for n in numbers
        )
        for language, numbers in positions.items()
    }


def _quoted(*columns: str) -> str:
    """Return a row in the csv dialect excel-tab, without its line end."""
    row = StringIO(newline="")
    csv.writer(row, "excel-tab").writerow(columns)  # quotes "\r" too, since a row ends with it
    return row.getvalue().removesuffix("\r\n")
