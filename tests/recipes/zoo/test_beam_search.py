"""Beam search finds what trying everything finds, and a cache changes nothing."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import penstock
from penstock.errors import ConfigError
from penstock_recipes.zoo import (
    Translations,
    TranslationTransformer,
    beam_search,
    translation_transformer,
)

BOS, EOS, PAD, NUM_WORDS = 1, 2, 0, 6
SOURCE = torch.tensor([[3, 4, 5, 3], [5, 5, 0, 0], [4, 0, 0, 0]])


def made() -> TranslationTransformer:
    """Give a model that is sure of some things, in double precision, so that nothing ties."""
    torch.manual_seed(5)
    model = translation_transformer(2, 32, 2, num_words=NUM_WORDS, width=16, head_width=8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model.double().eval()


def table(rows: dict[int, list[float]]) -> Callable[[Tensor, Tensor], Tensor]:
    """Make a model that goes by the last word: word -> probabilities of all words after it.

    After other words, which beams that stand for none may hold, nothing is likelier than another.
    """
    even = [1 / NUM_WORDS] * NUM_WORDS

    def forward(source_BS: Tensor, target_BT: Tensor) -> Tensor:
        probabilities = [[rows.get(word, even) for word in row] for row in target_BT.tolist()]
        return torch.tensor(probabilities).log()

    return forward


def scored(model: TranslationTransformer, source: Tensor, words: tuple[int, ...]) -> float:
    """Give the log-probability of a translation and its end, from one forward."""
    logits = model(source, torch.tensor([[BOS, *words]]))
    steps = logits[0].log_softmax(1)
    return sum(float(steps[n, word]) for n, word in enumerate((*words, EOS)))


def sentences(found: Translations, row: int) -> list[list[int]]:
    return [[w for w in words if w != PAD] for words in found.words_BKT[row].tolist()]


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
def test_a_wide_beam_finds_what_trying_everything_finds(penalty: float) -> None:
    model, length = made(), 4
    found = beam_search(model, SOURCE, beam=64, max_length=length, length_penalty=penalty)
    tried = [words for n in range(length) for words in product((3, 4, 5), repeat=n)]
    for row in range(len(SOURCE)):
        with torch.no_grad():
            scores = {
                words: scored(model, SOURCE[row : row + 1], words)
                / ((5 + len(words) + 1) / 6) ** penalty
                for words in tried
            }
        ranked = sorted(scores, key=lambda words: scores[words], reverse=True)
        assert sentences(found, row)[: len(tried)] == [list(words) for words in ranked]
        expected = torch.tensor([scores[words] for words in ranked])
        torch.testing.assert_close(found.scores_BK[row, : len(tried)], expected)
        assert (found.scores_BK[row, len(tried) :] == -math.inf).all()


def test_a_beam_of_one_is_greedy() -> None:
    model = made()
    found = beam_search(model, SOURCE, beam=1, max_length=7)
    for row in range(len(SOURCE)):
        said: list[int] = []
        while len(said) < 6:
            with torch.no_grad():
                logits = model(SOURCE[row : row + 1], torch.tensor([[BOS, *said]]))[0, -1]
            logits[[BOS, PAD]] = -math.inf
            word = int(logits.argmax())
            if word == EOS:
                break
            said.append(word)
        assert sentences(found, row) == [said]


@pytest.mark.parametrize("beam", [1, 3])
def test_a_cache_changes_nothing(beam: int) -> None:
    model = made()
    cached = beam_search(model, SOURCE, beam=beam, max_length=8)
    recomputed = beam_search(lambda s, t: model(s, t), SOURCE, beam=beam, max_length=8)
    assert torch.equal(cached.words_BKT, recomputed.words_BKT)
    torch.testing.assert_close(cached.scores_BK, recomputed.scores_BK)


def test_word_by_word_the_logits_are_those_of_the_forward() -> None:
    """To rounding: the products of one row and of many are added up in another order."""
    model = made()
    target = torch.randint(3, NUM_WORDS, (3, 6))
    with torch.no_grad():
        whole = model(SOURCE, target)
        state = model.start_decoding(SOURCE)
        for place in range(6):
            logits, state = model.next_word(target[:, place], state)
            torch.testing.assert_close(logits, whole[:, place])


def test_a_sentence_is_translated_alone_as_among_others() -> None:
    model = made()
    together = beam_search(model, SOURCE, beam=3, max_length=8)
    for row in range(len(SOURCE)):
        alone = beam_search(model, SOURCE[row : row + 1], beam=3, max_length=8)
        assert sentences(alone, 0) == sentences(together, row)


def test_the_source_is_encoded_once() -> None:
    model, calls = made(), []
    model.encoder[0].register_forward_hook(lambda *_: calls.append(1))
    beam_search(model, SOURCE, max_length=6)
    assert len(calls) == 1


def test_a_pipeline_translates_by_its_forward_alone() -> None:
    model = made()
    expected = beam_search(model, SOURCE, beam=2, max_length=5)
    batch = SOURCE, SOURCE
    with penstock.Pipeline(
        model, 2, example_inputs=batch, threads_per_stage=1, num_microbatches=1
    ) as pipe:
        found = beam_search(lambda *both: pipe.eval_step(both), SOURCE, beam=2, max_length=5)
    assert torch.equal(found.words_BKT, expected.words_BKT)


def test_the_length_penalty_decides_between_short_and_long() -> None:
    """Saying nothing has a probability of 0.3; one word and the end, of 0.7 * 0.4 = 0.28."""
    model = table({BOS: [0, 0, 0.3, 0.7, 0, 0], 3: [0, 0, 0.4, 0.6, 0, 0]})
    source = torch.tensor([[3]])
    short = beam_search(model, source, max_length=2, length_penalty=0.0)
    long = beam_search(model, source, max_length=2, length_penalty=1.0)
    assert short.best_BT.tolist() == [[0]]
    assert long.best_BT.tolist() == [[3]]
    nothing, word = math.log(0.3), math.log(0.7 * 0.4) / (7 / 6)
    torch.testing.assert_close(long.scores_BK[0, :2], torch.tensor([word, nothing]))


def test_a_beam_finds_what_greed_misses() -> None:
    rows = {BOS: [0, 0, 0, 0.6, 0.4, 0], 3: [0, 0, 0.3, 0.3, 0.2, 0.2], 4: [0, 0, 1.0, 0, 0, 0]}
    model = table({**rows, 5: [0, 0, 1.0, 0, 0, 0]})
    source = torch.tensor([[3]])
    assert beam_search(model, source, beam=2, max_length=3).best_BT.tolist() == [[4]]
    assert beam_search(model, source, beam=1, max_length=3).best_BT.tolist() != [[4]]


def test_a_sentence_that_does_not_end_is_ended() -> None:
    model = table({word: [0, 0, 0.1, 0.9, 0, 0] for word in (BOS, 3)})
    found = beam_search(model, torch.tensor([[3]]), beam=1, max_length=4)
    assert found.words_BKT.tolist() == [[[3, 3, 3]]]
    expected = math.log(0.9**3 * 0.1) / (9 / 6) ** 0.6
    torch.testing.assert_close(found.scores_BK, torch.tensor([[expected]]))


def test_a_sentence_that_is_done_is_computed_no_more() -> None:
    rows = {BOS: [0, 0, 0.9, 0.1, 0, 0], 3: [0, 0, 0.1, 0.9, 0, 0]}
    sizes, forward = [], table(rows)

    def model(source_BS: Tensor, target_BT: Tensor) -> Tensor:
        sizes.append(len(source_BS))
        return forward(source_BS, target_BT)

    beam_search(model, torch.tensor([[3], [4]]), beam=1, max_length=9)
    assert sizes == [2]


def test_padding_and_beginning_are_never_said() -> None:
    model = table({word: [0.4, 0.4, 0.1, 0.1, 0, 0] for word in (BOS, 3)})
    found = beam_search(model, torch.tensor([[3]]), beam=2, max_length=3, eos=EOS)
    assert set(found.words_BKT[:, 0].flatten().tolist()) <= {3, PAD}
    assert sentences(found, 0) == [[], [3]]


def test_every_part_of_the_model_is_in_its_mode_afterwards() -> None:
    model = made().train()
    model.encoder[1].eval()
    before = [module.training for module in model.modules()]
    seen: list[bool] = []
    model.head.register_forward_hook(lambda module, *_: seen.append(module.training))
    beam_search(model, SOURCE, max_length=2)
    assert [module.training for module in model.modules()] == before
    assert set(seen) == {False}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam": 0}, "beam=0: give an integer from 1 up"),
        ({"max_length": 0}, "max_length=0: give an integer"),
        ({"length_penalty": -1.0}, "length_penalty=-1.0 would favour"),
        ({"eos": 1}, "bos=1, eos=1, pad=0: the words"),
        ({"max_length": 2000}, "2000 words is longer than the model's max_length=1024"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        beam_search(made(), SOURCE, **{"max_length": 4, **options})
