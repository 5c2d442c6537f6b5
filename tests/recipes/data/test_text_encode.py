"""Pairs as tokens, and samples side by side as the model takes them."""

import pytest
import torch

from penstock.errors import ConfigError
from penstock_recipes.data.text import (
    BOS,
    EOS,
    PAD,
    EncodedPairs,
    ParallelCorpus,
    Vocabulary,
    collate,
    encode_part,
    load_names,
    num_real_tokens,
    train_vocabulary,
)

LANGUAGES = ("de", "ja")


@pytest.fixture(scope="module")
def corpus() -> ParallelCorpus:
    return load_names(LANGUAGES)


@pytest.fixture(scope="module")
def vocabulary(corpus: ParallelCorpus) -> Vocabulary:
    return train_vocabulary(corpus.train, 600)


@pytest.fixture(scope="module")
def encoded(corpus: ParallelCorpus, vocabulary: Vocabulary) -> EncodedPairs:
    return encode_part(corpus.train, vocabulary, max_length=200)


def test_every_pair_becomes_a_sample_in_order(corpus, vocabulary, encoded) -> None:
    assert encoded.languages == LANGUAGES and encoded.num_dropped == {"de": 0, "ja": 0}
    assert len(encoded) == sum(map(len, corpus.train.values()))
    positions = encoded.by_language(encoded.positions_N.tolist())
    assert positions == {name: list(range(len(corpus.train[name]))) for name in LANGUAGES}
    (japanese,) = vocabulary.encode_sources(corpus.train["ja"].sources[:1], "ja")
    first = len(corpus.train["de"])
    assert encoded.sources.padded(torch.tensor([first])).tolist() == [japanese]


def test_lengths_are_what_the_model_sees(encoded: EncodedPairs) -> None:
    for n in (0, 7, len(encoded) - 1):
        batch = collate(encoded, torch.tensor([n]))
        shapes = [batch.source_BS.shape[1], batch.target_in_BT.shape[1]]
        assert encoded.lengths_N2[n].tolist() == shapes


def test_a_batch_holds_the_texts_and_padding(corpus, vocabulary, encoded) -> None:
    samples = torch.tensor([5, 3, 900, 3])
    batch = collate(encoded, samples)
    longest = encoded.lengths_N2[samples].amax(dim=0).tolist()
    assert batch.source_BS.shape == (4, longest[0])
    assert batch.target_in_BT.shape == batch.target_out_BT.shape == (4, longest[1])
    for row, n in enumerate(samples.tolist()):
        source, target = (corpus.train["de"].sources[n], corpus.train["de"].targets[n])
        ids = next(iter(vocabulary.encode_targets([target])))
        padding = [PAD] * (longest[1] - len(ids))
        assert batch.target_out_BT[row].tolist() == [*ids, *padding]
        assert batch.target_in_BT[row].tolist() == [BOS, *ids[:-1], *padding]
        assert vocabulary.decode(batch.source_BS[row].tolist()) == source
    for tensor in (batch.source_BS, batch.target_in_BT, batch.target_out_BT):
        assert tensor.dtype == torch.int64


def test_real_target_tokens_are_those_that_are_no_padding(encoded: EncodedPairs) -> None:
    samples = torch.arange(10)
    batch = collate(encoded, samples)
    assert batch.num_target_tokens == int(encoded.lengths_N2[samples, 1].sum())
    assert num_real_tokens(batch.target_out_BT[:4]) == int(encoded.lengths_N2[:4, 1].sum())
    assert int((batch.target_out_BT == EOS).sum()) == len(samples)


def test_a_pair_longer_than_the_model_takes_is_refused(corpus, vocabulary) -> None:
    with pytest.raises(ConfigError, match=r"longer than the 10 tokens .*\(de \d+, ja \d+\)"):
        encode_part(corpus.train, vocabulary, max_length=10)


def test_or_is_dropped_and_counted(corpus, vocabulary, encoded) -> None:
    fewer = encode_part(corpus.train, vocabulary, max_length=10, too_long="drop")
    fits = encoded.lengths_N2.amax(dim=1) <= 10
    assert 0 < len(fewer) == int(fits.sum()) < len(encoded)
    assert torch.equal(fewer.positions_N, encoded.positions_N[fits])
    assert torch.equal(fewer.lengths_N2, encoded.lengths_N2[fits])
    assert len(fewer) + sum(fewer.num_dropped.values()) == len(encoded)


def test_a_length_that_just_fits_is_kept(vocabulary: Vocabulary, encoded: EncodedPairs) -> None:
    longest = int(encoded.lengths_N2.max())
    corpus = load_names(LANGUAGES)
    assert len(encode_part(corpus.train, vocabulary, max_length=longest)) == len(encoded)
    with pytest.raises(ConfigError, match=f"longer than the {longest - 1} tokens"):
        encode_part(corpus.train, vocabulary, max_length=longest - 1)


def test_unknown_words_for_what_is_too_long_are_refused(corpus, vocabulary) -> None:
    with pytest.raises(ConfigError, match=r"too_long='cut': must be \"refuse\" or \"drop\""):
        encode_part(corpus.train, vocabulary, max_length=10, too_long="cut")  # type: ignore[arg-type]


def test_a_part_of_no_pairs_has_no_samples(vocabulary: Vocabulary) -> None:
    empty = encode_part({}, vocabulary, max_length=10)
    assert len(empty) == 0 and empty.lengths_N2.shape == (0, 2) and empty.by_language([]) == {}
