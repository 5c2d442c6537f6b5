"""The names of things in many languages, as Babel has them: real text that needs no download."""

import sys
from collections.abc import Iterator

import pytest
from babel import Locale
from babel.core import get_global
from babel.localedata import locale_identifiers

from penstock.errors import ConfigError
from penstock_recipes.data.text import (
    NAME_KINDS,
    NAME_LANGUAGES,
    ParallelCorpus,
    TextPart,
    load_names,
)
from penstock_recipes.data.text.corpus import group_of
from penstock_recipes.data.text.names import names_in

FEW = ("de", "fr", "ja", "sk")


@pytest.fixture(scope="module")
def corpus() -> ParallelCorpus:
    return load_names()


def pairs_of(part: TextPart) -> Iterator[tuple[str, str, str]]:
    for language, pairs in part.items():
        for source, target in zip(pairs.sources, pairs.targets, strict=True):
            yield language, source, target


@pytest.mark.slow
def test_there_are_names_in_more_than_60_languages(corpus: ParallelCorpus) -> None:
    assert len(corpus.languages) == len(NAME_LANGUAGES) > 60
    assert corpus.languages == NAME_LANGUAGES
    assert all(len(pairs) > 850 for pairs in corpus.train.values())
    assert all(len(pairs) > 25 for pairs in corpus.test.values())


def test_the_languages_are_those_with_1000_names_of_their_own() -> None:
    english = names_in("en", NAME_KINDS)

    def num_own(language: str) -> int:
        names = names_in(language, NAME_KINDS)
        return sum(name != english.get(item, name) for item, name in names.items())

    inheriting = get_global("parent_exceptions")
    languages = {name for name in locale_identifiers() if "_" not in name} - {"en", *inheriting}
    assert sorted(name for name in languages if num_own(name) >= 1000) == list(NAME_LANGUAGES)


def test_a_name_is_paired_with_the_english_name_of_the_same_thing() -> None:
    found = load_names(FEW)
    pairs: set[tuple[str, str, str]] = set()
    for part in (found.train, found.valid, found.test):
        pairs.update(pairs_of(part))
    assert {
        *(("de", "Frankreich", "France"), ("fr", "japonais", "Japanese")),
        *(("ja", "スイス フラン", "Swiss Franc"), ("sk", "sekundy", "seconds")),
    } <= pairs


def test_every_kind_of_name_is_what_babel_has() -> None:
    german = Locale("de")
    names = names_in("de", ["territories", "languages", "scripts", "currencies", "units"])
    assert names["territories", "CH"] == german.territories["CH"]
    assert names["languages", "ja"] == german.languages["ja"]
    assert names["scripts", "Grek"] == german.scripts["Grek"]
    assert names["currencies", "CHF"] == german.currencies["CHF"]
    assert names["units", "angle-radian"] == "Radiant"


def test_no_tested_pair_is_trained_on_in_any_language(corpus: ParallelCorpus) -> None:
    trained = {group_of(source, target) for _, source, target in pairs_of(corpus.train)}
    for part in (corpus.test, corpus.valid):
        held_out = {group_of(source, target) for _, source, target in pairs_of(part)}
        assert held_out and trained.isdisjoint(held_out)


def test_the_english_side_of_a_held_out_pair_is_learnt_from_other_languages(corpus) -> None:
    trained = {target for _, _, target in pairs_of(corpus.train)}
    assert {target for _, _, target in pairs_of(corpus.test)} <= trained


def test_a_pair_is_there_once_in_a_language(corpus: ParallelCorpus) -> None:
    everywhere = [
        (language, group_of(source, target))
        for part in (corpus.train, corpus.valid, corpus.test)
        for language, source, target in pairs_of(part)
    ]
    assert len(set(everywhere)) == len(everywhere)


def test_no_name_is_empty_or_has_space_around_it(corpus: ParallelCorpus) -> None:
    for _, source, target in pairs_of(corpus.train):
        assert source and target and source == source.strip() and target == target.strip()


def test_a_limit_makes_a_language_a_low_resource_one_and_leaves_its_test() -> None:
    whole, limited = load_names(FEW), load_names(FEW, most_pairs={"sk": 40, "ja": 10_000})
    assert len(limited.train["sk"]) == 40
    assert set(limited.train["sk"].sources) < set(whole.train["sk"].sources)
    assert limited.train["ja"] == whole.train["ja"] and limited.train["de"] == whole.train["de"]
    assert limited.test == whole.test and limited.valid == whole.valid


def test_a_language_has_the_same_split_whatever_the_others_are() -> None:
    few, one = load_names(FEW, most_pairs={"sk": 40}), load_names(["sk"], most_pairs={"sk": 40})
    assert few.train["sk"] == one.train["sk"] and few.test["sk"] == one.test["sk"]


def test_the_seed_decides_what_is_held_out() -> None:
    assert load_names(FEW, seed=1) == load_names(FEW, seed=1)
    assert load_names(FEW, seed=1).test != load_names(FEW, seed=2).test


def test_what_others_loaded_before_changes_nothing() -> None:
    before = names_in("nn", NAME_KINDS)
    Locale("no").territories.get("FR")
    assert names_in("nn", NAME_KINDS) == before
    assert before["territories", "FR"] == "Frankrike"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"languages": ["de", "tlh"]}, "no language 'tlh' in Babel's data"),
        ({"languages": ["de", "en"]}, "no language 'en' in Babel's data"),
        ({"languages": ["de", "de"]}, r"languages=\['de', 'de'\]: name at least one, and none"),
        ({"languages": []}, r"languages=\[\]: name at least one"),
        ({"kinds": ["rivers"]}, r"kinds=\['rivers'\]: choose among territories, languages,"),
        ({"kinds": []}, r"kinds=\[\]: choose among"),
        ({"most_pairs": {"it": 3}}, "no language 'it' in languages, and most_pairs limits it"),
        ({"most_pairs": {"de": 0}}, r"most_pairs=\{'de': 0\}: leave at least 1 pair"),
        ({"held_out_share": 0.3}, "held_out_share=0.3: give a share between 0 and 0.25"),
    ],
)
def test_what_cannot_be_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_names(**{"languages": FEW, **options})


def test_without_babel_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("babel", "babel.localedata"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ConfigError, match=r"needs babel, .* pip install 'penstock-recipes\[translation\]'"
    ):
        load_names(FEW)
