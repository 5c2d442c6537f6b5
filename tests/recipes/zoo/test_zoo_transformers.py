"""The zoo's Transformers: as large as published, and each does what its docstring says."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock_recipes.zoo import (
    GPT_SIZES,
    Tied,
    TranslationTransformer,
    gpt,
    shift_right,
    smoothed_cross_entropy,
    transformer_lm,
    translation_transformer,
)
from penstock_recipes.zoo.attention import sinusoids
from penstock_recipes.zoo.gpt_family import GPT

SMALL: dict[str, Any] = {"num_words": 11, "width": 8, "max_length": 9}


def count(build: Callable[..., nn.Module], *args: Any, **options: Any) -> int:
    """Count the parameters of a model, for which there is no memory."""
    with torch.device("meta"):
        model = build(*args, **options)
    return sum(parameter.numel() for parameter in model.parameters())


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return transformer_lm(2, ff_width=16, num_heads=2, **SMALL)


def decoder(**options: Any) -> GPT:
    torch.manual_seed(0)
    return gpt(num_layers=2, num_heads=2, **SMALL, **options)


def translator(**options: Any) -> TranslationTransformer:
    torch.manual_seed(0)
    return translation_transformer(2, 16, 3, head_width=4, **{**SMALL, **options})


# -- counts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "millions"),
    [
        *((3, 282.2), (13, 785.8), (103, 5_300.0), (415, 21_000.0)),
        pytest.param(1663, 83_900.0, marks=pytest.mark.slow),
    ],
)
def test_the_scaling_model_has_the_papers_parameters(num_layers: int, millions: float) -> None:
    parameters = count(transformer_lm, num_layers)
    assert parameters == num_layers * 50_358_272 + 131_104_000
    digits = 1 if millions < 1000 else -2
    assert round(parameters / 1e6, digits) == millions


@pytest.mark.parametrize("size", GPT_SIZES)
def test_gpt_has_the_parameters_of_its_name(size: str) -> None:
    """The names have two digits, and some are cut off rather than rounded: 4 % covers that."""
    parameters, (layers, width, _) = count(gpt, size), GPT_SIZES[size].values()
    assert parameters == layers * (12 * width**2 + 13 * width) + (51_200 + 1024 + 2) * width
    number = float(size[:-1]) * (1e6 if size.endswith("M") else 1e9)
    assert parameters == pytest.approx(number, rel=0.04)
    assert count(gpt, size, tied=False) == parameters + 51_200 * width


@pytest.mark.parametrize(
    ("sizes", "published", "of_two", "of_three"),
    [
        ((6, 8192, 16), 0.4, 0.408, 0.473),
        ((24, 8192, 16), 1.3, 1.24, 1.30),
        ((12, 16384, 32), 1.3, 1.24, 1.30),
        ((32, 16384, 32), 3.0, 3.08, 3.15),
        ((64, 16384, 32), 6.0, 6.04, 6.10),
    ],
)
def test_translation_has_the_papers_parameters(sizes, published, of_two, of_three) -> None:
    """Counts without biases and norms are the derived ones to a digit of their last place."""
    two = count(translation_transformer, *sizes)
    three = count(translation_transformer, *sizes, tied="nothing")
    assert two / 1e9 == pytest.approx(published, rel=0.05)
    last = 1e-3 if published < 1 else 1e-2
    assert abs(two / 1e9 - of_two) < last
    assert abs(three / 1e9 - of_three) < last
    assert three - two == two - count(translation_transformer, *sizes, tied=Tied.ALL) == 65_536_000


# -- what looks at what -----------------------------------------------------------------------


@pytest.mark.parametrize("build", [language_model, decoder])
def test_a_language_model_does_not_know_the_future(build: Callable[[], nn.Module]) -> None:
    model = build().eval()
    words = torch.randint(11, (2, 9))
    other = words.clone()
    other[:, 5:] = (other[:, 5:] + 1) % 11
    before, after = model(words), model(other)
    assert before.shape == (2, 9, 11)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_a_translation_knows_the_whole_source_and_what_was_said() -> None:
    model = translator().eval()
    source, target = torch.randint(1, 11, (2, 6)), torch.randint(1, 11, (2, 5))
    before = model(source, target)
    said = target.clone()
    said[:, 3] = said[:, 3] % 10 + 1
    assert torch.equal(model(source, said)[:, :3], before[:, :3])
    assert not torch.equal(model(source, said)[:, 3], before[:, 3])
    source[:, 5] = source[:, 5] % 10 + 1
    assert not torch.equal(model(source, target)[:, 0], before[:, 0])


def test_pads_in_the_source_change_nothing() -> None:
    """To rounding: kernels add up in another order for another length."""
    model = translator().double().eval()
    source, target = torch.randint(1, 11, (2, 5)), torch.randint(1, 11, (2, 4))
    padded = torch.cat((source, torch.zeros(2, 3, dtype=torch.int64)), dim=1)
    torch.testing.assert_close(model(padded, target), model(source, target))


def test_a_row_of_nothing_but_pads_leaves_all_gradients_numbers() -> None:
    model = translator()
    source, target = torch.tensor([[3, 4, 5], [0, 0, 0]]), torch.tensor([[6, 7], [0, 0]])
    smoothed_cross_entropy(model(source, shift_right(target, bos=1)), target).backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_sinusoids_are_those_of_the_paper() -> None:
    found = sinusoids(3, 2, torch.empty(6))
    for row, place in enumerate((3, 4)):
        angles = [place / 10_000 ** (2 * i / 6) for i in range(3)]
        expected = [*map(math.sin, angles), *map(math.cos, angles)]
        torch.testing.assert_close(found[row], torch.tensor(expected))


# -- weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [language_model, decoder, translator])
def test_the_seed_decides_the_weights(build: Callable[[], nn.Module]) -> None:
    one, same = build().state_dict(), build().state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)


def test_tied_matrices_are_one_parameter() -> None:
    model = translator(tied="all")
    source, target = model.source_embedding.words, model.target_embedding.words
    assert source.weight is target.weight is model.head.weight
    model = translator(tied="decoder")
    assert model.source_embedding.words.weight is not model.head.weight
    assert model.target_embedding.words.weight is model.head.weight
    gpt_model = decoder()
    assert gpt_model.embedding.words.weight is gpt_model.head.weight


def test_feed_forward_weights_alone_are_scaled_by_depth() -> None:
    scaled, plain = translator().state_dict(), translator(depth_scaled=False).state_dict()
    for name, weight in plain.items():
        factor = 2 ** (-1 / 4) if "feed_forward." in name else 1.0
        torch.testing.assert_close(scaled[name], weight * factor)


def test_what_gpt_adds_starts_smaller_the_more_layers_there_are() -> None:
    torch.manual_seed(0)
    model = gpt(num_layers=8, width=128, num_heads=2, num_words=11)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            writes = name.endswith(("output.weight", "narrow.weight"))
            expected = 0.02 / math.sqrt(2 * 8) if writes else 0.02
            assert weight.std().item() == pytest.approx(expected, rel=0.05)


# -- the loss ---------------------------------------------------------------------------------


def test_logits_are_clipped_in_training_only() -> None:
    model = translator(dropout=0.0, logit_clip=0.25)
    batch = torch.randint(1, 11, (2, 6)), torch.randint(1, 11, (2, 5))
    in_training, in_evaluation = model(*batch), model.eval()(*batch)
    assert in_evaluation.abs().max() > 0.25
    torch.testing.assert_close(in_training, in_evaluation.clamp(-0.25, 0.25))


def test_the_decoder_reads_what_was_said_before() -> None:
    target = torch.tensor([[5, 6, 2], [7, 2, 0]])
    assert shift_right(target, bos=1).tolist() == [[1, 5, 6], [1, 7, 2]]


def test_the_loss_is_the_mean_over_real_words_of_smoothed_cross_entropy() -> None:
    logits, target = torch.randn(2, 3, 5), torch.tensor([[4, 2, 3], [1, 0, 0]])
    found = smoothed_cross_entropy(logits, target, smoothing=0.2)
    terms = []
    for row, place in ((0, 0), (0, 1), (0, 2), (1, 0)):
        label = torch.full((5,), 0.2 / 5)
        label[target[row, place]] += 0.8
        terms.append(-(label * logits[row, place].log_softmax(0)).sum())
    torch.testing.assert_close(found, torch.stack(terms).mean())


def test_the_loss_of_no_real_word_is_0() -> None:
    logits = torch.randn(1, 3, 5, requires_grad=True)
    loss = smoothed_cross_entropy(logits, torch.full((1, 3), 4), pad=4)
    loss.backward()
    assert loss == 0
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros(1, 3, 5))


# -- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: transformer_lm(0), "num_layers=0: give an integer from 1 up"),
        (lambda: transformer_lm(2, dropout=1.0), "dropout=1.0: give a share"),
        (lambda: transformer_lm(2, width=30, num_heads=4), "width=30 cannot be shared out"),
        (lambda: transformer_lm(2, width=9, num_heads=3), "width=9 is odd"),
        (lambda: gpt("1.4B"), "size='1.4B' is not known; choose one of '350M', '760M'"),
        (lambda: gpt(num_layers=2, width=8), "num_heads not given; give all of num_layers, width"),
        (lambda: gpt("350M", num_heads=7), "width=1024 cannot be shared out among num_heads=7"),
        (lambda: gpt("350M", num_words=0), "num_words=0: give an integer"),
        (lambda: translator(tied="both"), 'tied=\'both\'; choose "nothing", "decoder", "all"'),
        (lambda: translator(logit_clip=0.0), "logit_clip=0.0: give a number above 0"),
        (lambda: translator(pad=11), "pad=11 is none of the num_words=11 words"),
    ],
)
def test_sizes_that_cannot_work_are_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize(
    ("build", "lengths"),
    [(language_model, [10]), (decoder, [10]), (translator, [10, 3]), (translator, [3, 10])],
)
def test_a_sequence_that_is_too_long_is_refused(build, lengths: list[int]) -> None:
    with pytest.raises(ConfigError, match="10 words is longer than the model's max_length=9"):
        build()(*(torch.ones(1, length, dtype=torch.int64) for length in lengths))
