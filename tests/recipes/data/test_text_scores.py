"""Scores of translations: sacrebleu's figures by language, and a table of several systems."""

import sys

import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from penstock.errors import ConfigError
from penstock_recipes.data.text import (
    Score,
    Scores,
    TextPairs,
    compare,
    identity_scores,
    load_names,
    score_translations,
)

PART = {
    "de": TextPairs(
        ("der schnelle braune Fuchs springt", "Peru"), ("the quick brown fox jumps", "Peru")
    ),
    "fr": TextPairs(("le monde",), ("the world",)),
}


def test_scores_are_those_of_sacrebleu() -> None:
    texts = {"de": ["the quick brown fox sleeps", "Perú"], "fr": ["the word"]}
    scores = score_translations(texts, PART, target="en")
    for language, found in scores.by_language.items():
        references = [list(PART[language].targets)]
        assert found.bleu == BLEU().corpus_score(texts[language], references).score
        assert found.chrf == CHRF().corpus_score(texts[language], references).score
        assert found.num_texts == len(texts[language])


def test_perfect_translations_score_100() -> None:
    texts = {"de": PART["de"].targets}
    scores = score_translations(texts, PART, target="en")
    assert scores.by_language["de"].bleu == pytest.approx(100)
    assert scores.by_language["de"].chrf == 100


def test_the_mean_counts_each_language_once() -> None:
    german = Score(bleu=10.0, chrf=30.0, num_texts=999)
    french = Score(bleu=20.0, chrf=50.0, num_texts=1)
    scores = Scores({"de": german, "fr": french})
    assert scores.mean_bleu == 15 and scores.mean_chrf == 40
    assert scores.only(["fr"]).mean_chrf == 50


def test_the_identity_baseline_gives_sources_for_translations() -> None:
    scores = identity_scores(PART, target="en")
    sources = {language: pairs.sources for language, pairs in PART.items()}
    assert scores == score_translations(sources, PART, target="en")
    assert 0 < scores.by_language["de"].chrf < 100


def test_on_real_names_the_identity_knows_scripts_apart() -> None:
    scores = identity_scores(load_names(["de", "ja"]).test, target="en").by_language
    assert scores["ja"].chrf < 15 < scores["de"].chrf


def test_chinese_words_are_found_by_character() -> None:
    part = {"en": TextPairs(("the world",), ("世界很大很美",))}
    texts = {"en": ["世界很大很好"]}
    assert (
        score_translations(texts, part, target="zh").by_language["en"].bleu
        > score_translations(texts, part, target="en").by_language["en"].bleu
    )


def test_a_table_has_a_line_for_each_language_and_one_for_the_mean() -> None:
    one = Scores({"de": Score(bleu=1.25, chrf=20.0, num_texts=1200)})
    german = Score(bleu=30.0, chrf=45.25, num_texts=1200)
    two = Scores({"de": german, "fr": Score(bleu=50.0, chrf=100.0, num_texts=7)})
    assert compare({"identity": one, "model": two}) == (
        "language  texts  identity BLEU  identity chrF  model BLEU  model chrF\n"
        "de        1,200            1.2           20.0        30.0        45.2\n"
        "fr            7              -              -        50.0       100.0\n"
        "mean                       1.2           20.0        40.0        72.6"
    )
    assert str(one) == (
        "language  texts  BLEU  chrF\nde        1,200   1.2  20.0\nmean              1.2  20.0"
    )


def test_another_number_of_translations_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 translations from 'de' and 2 texts to compare"):
        score_translations({"de": ["the"]}, PART, target="en")
    with pytest.raises(ConfigError, match="1 translations from 'it' and 0 texts to compare"):
        score_translations({"it": ["the"]}, PART, target="en")
    with pytest.raises(ConfigError, match="there are no translations to compare"):
        score_translations({}, PART, target="en")


def test_a_language_that_sacrebleu_cannot_cut_into_words_is_refused(monkeypatch) -> None:
    for module in ("MeCab", "ipadic"):
        monkeypatch.setitem(sys.modules, module, None)
    part = {"en": TextPairs(("the world",), ("世界",))}
    with pytest.raises(ConfigError, match="sacrebleu cannot find words in 'ja'"):
        score_translations({"en": ["世界"]}, part, target="ja")


def test_without_sacrebleu_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sacrebleu", "sacrebleu.metrics"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"needs sacrebleu, .*penstock-recipes\[translation\]'"):
        identity_scores(PART, target="en")
