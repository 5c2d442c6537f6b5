"""Beam search: the best translations of many sentences at once.

Shapes: B sentences, R of them still searched, K beams of each, V words; N = R * K rows, the beams
of a sentence next to each other.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock_recipes.zoo.transformer_sizes import require_at_least
from penstock_recipes.zoo.words import check_length

from .model import DecodingState, TranslationTransformer

Forward = Callable[[Tensor, Tensor], Tensor]
"""(source (B, S), target (B, T)) -> logits (B, T, V), as a model's own forward."""


class Decoder(Protocol):
    """Sentences that are being translated, a row for each."""

    def next(self, words_N: Tensor) -> tuple[Tensor, Self]:
        """Take one more word for each row; give the logits (N, V) of what follows."""

    def rows(self, rows_N: Tensor) -> Self:
        """Return row rows_N[n] as row n, for each n."""


@dataclass(frozen=True, slots=True)
class Caching:
    """Decodes with what the model keeps: each word is computed once, the source as well."""

    model: TranslationTransformer
    state: DecodingState

    def next(self, words_N: Tensor) -> tuple[Tensor, "Caching"]:
        """Take one more word for each row."""
        logits_NV, state = self.model.next_word(words_N, self.state)
        return logits_NV, Caching(self.model, state)

    def rows(self, rows_N: Tensor) -> "Caching":
        """Return other rows."""
        return Caching(self.model, self.state.rows(rows_N))


@dataclass(frozen=True, slots=True)
class Recomputing:
    """Decodes with nothing but a forward, which sees source and target anew for each word."""

    forward: Forward
    source_NS: Tensor
    target_NT: Tensor

    def next(self, words_N: Tensor) -> tuple[Tensor, "Recomputing"]:
        """Take one more word for each row."""
        target_NT = torch.cat((self.target_NT, words_N.unsqueeze(1)), dim=1)
        logits_NTV = self.forward(self.source_NS, target_NT)
        return logits_NTV[:, -1], Recomputing(self.forward, self.source_NS, target_NT)

    def rows(self, rows_N: Tensor) -> "Recomputing":
        """Return other rows."""
        source_NS, target_NT = self.source_NS[rows_N], self.target_NT[rows_N]
        return Recomputing(self.forward, source_NS, target_NT)


@dataclass(frozen=True, slots=True)
class Translations:
    """The best K translations of each sentence, best first.

    Words end before the end of the sentence, and are filled up with pads.  Where fewer than K were
    found, there are pads only, with a score of -inf.
    """

    words_BKT: Tensor
    scores_BK: Tensor

    @property
    def best_BT(self) -> Tensor:
        """The best translation of each sentence."""
        return self.words_BKT[:, 0]


@dataclass(frozen=True, slots=True)
class Beam:
    """A translation that has not ended: the row of its state, its words, its log-probability.

    A score of -inf is that of a beam which stands for none.
    """

    row: int
    words: tuple[int, ...]
    score: float


@dataclass(slots=True)
class Sentence:
    """What was found for one sentence: (score, words) of what ended, and beams that go on."""

    ended: list[tuple[float, tuple[int, ...]]]
    beams: list[Beam]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How to search."""

    beam: int
    length_penalty: float
    max_length: int
    bos: int
    eos: int
    pad: int

    def score(self, log_probability: float, length: int) -> float:
        """Divide by the length penalty of GNMT (Wu et al. 2016, arXiv 1609.08144, equation 14)."""
        penalty: float = ((5 + length) / 6) ** self.length_penalty
        return log_probability / penalty


def beam_search(  # noqa: PLR0913 - the front door: each a keyword with a default
    model: TranslationTransformer | Forward,
    source_BS: Tensor,
    *,
    max_length: int,
    beam: int = 4,
    length_penalty: float = 0.6,
    bos: int = 1,
    eos: int = 2,
    pad: int = 0,
) -> Translations:
    """Search for the most probable translations of `source_BS`; `beam=1` is greedy.

    A `TranslationTransformer` encodes the source once and keeps what it computes.  Anything else
    that takes (source, target) and gives logits works too, each word at the cost of all before,
    such as a pipeline: `lambda *batch: pipe.eval_step(batch)`.  A module is in evaluation mode
    meanwhile.

    In each step, the `beam` best continuations of a sentence's beams are those that count.  Where
    one of these ends the sentence, it is set aside; the best `beam` of the others go on.  A
    sentence is done as soon as `beam` translations have ended.  After `max_length` words, the end
    included, whatever goes on is ended.  `bos` and `pad` are never said.

    Translations are ranked by log-probability / ((5 + length) / 6) ** length_penalty, where the
    length counts the end.  0.6 is that of Vaswani et al. 2017 (GPipe's paper does not say); 0
    compares probabilities, which favours short sentences.  There is no coverage penalty.

    Raises:
        ConfigError: `beam` or `max_length` is below 1, the penalty is negative, two of `bos`,
            `eos` and `pad` are one word, or the model takes fewer than `max_length` words.
    """
    rules = Rules(
        beam=beam, length_penalty=length_penalty, max_length=max_length, bos=bos, eos=eos, pad=pad
    )
    _check(rules)
    with torch.no_grad(), evaluating(model):
        decoder = _start(model, source_BS, max_length)
        found = _search(decoder, rules, source_BS)
    return _as_tensors(found, rules, source_BS.device)


@contextmanager
def evaluating(model: object) -> Iterator[None]:
    """Have a module in evaluation mode; its parts are as they were afterwards."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    before = [(module, module.training) for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def _start(model: TranslationTransformer | Forward, source_BS: Tensor, max_length: int) -> Decoder:
    if isinstance(model, TranslationTransformer):
        check_length(max_length, model.target_embedding.max_length)
        return Caching(model, model.start_decoding(source_BS))
    return Recomputing(model, source_BS, source_BS.new_empty((len(source_BS), 0)))


def _search(decoder: Decoder, rules: Rules, source_BS: Tensor) -> list[Sentence]:
    every_N = torch.arange(len(source_BS), device=source_BS.device)
    decoder = decoder.rows(every_N.repeat_interleave(rules.beam))
    sentences = [_unsaid(number, rules.beam) for number in range(len(source_BS))]
    words_N = source_BS.new_full((len(sentences) * rules.beam,), rules.bos)
    active = sentences
    for length in range(1, rules.max_length + 1):
        logits_NV, decoder = decoder.next(words_N)
        _go_on(active, logits_NV, rules, is_last=length == rules.max_length)
        active = [sentence for sentence in active if len(sentence.ended) < rules.beam]
        if not active or length == rules.max_length:
            break
        beams = [beam for sentence in active for beam in sentence.beams]
        decoder = decoder.rows(every_N.new_tensor([beam.row for beam in beams]))
        words_N = source_BS.new_tensor([beam.words[-1] for beam in beams])
    return sentences


def _unsaid(number: int, num_beams: int) -> Sentence:
    """Return a sentence without a word: one beam, and others that stand for none."""
    scores = [0.0, *[-math.inf] * (num_beams - 1)]
    rows = range(number * num_beams, (number + 1) * num_beams)
    return Sentence([], [Beam(row, (), score) for row, score in zip(rows, scores, strict=True)])


def _go_on(active: list[Sentence], logits_NV: Tensor, rules: Rules, *, is_last: bool) -> None:
    """Let each sentence end or go on with its best continuations."""
    allowed_NV = _allowed(logits_NV, rules, is_last=is_last)
    scores_RK = allowed_NV.new_tensor([[beam.score for beam in s.beams] for s in active])
    totals_RKV = scores_RK.unsqueeze(2) + allowed_NV.unflatten(0, scores_RK.shape)
    best = totals_RKV.flatten(1).topk(2 * rules.beam)
    num_words = logits_NV.shape[1]
    for number, sentence in enumerate(active):
        beams = []
        continuations = zip(
            best.indices[number].tolist(), best.values[number].tolist(), strict=True
        )
        for rank, (place, score) in enumerate(continuations):
            parent, word = divmod(place, num_words)
            said = sentence.beams[parent].words
            if word != rules.eos:
                beams.append(Beam(number * rules.beam + parent, (*said, word), score))
            elif rank < rules.beam and score > -math.inf:
                sentence.ended.append((rules.score(score, len(said) + 1), said))
        sentence.beams = beams[: rules.beam]


def _allowed(logits_NV: Tensor, rules: Rules, *, is_last: bool) -> Tensor:
    """Compute log-probabilities; -inf for what must not be said now."""
    precise = torch.promote_types(logits_NV.dtype, torch.float32)
    found_NV = logits_NV.to(precise).log_softmax(1)
    barred_V = torch.full_like(found_NV[0], is_last, dtype=torch.bool)
    barred_V[[rules.bos, rules.pad]] = True
    barred_V[rules.eos] = False
    return found_NV.masked_fill(barred_V, -math.inf)


def _as_tensors(sentences: list[Sentence], rules: Rules, device: torch.device) -> Translations:
    best = [sorted(s.ended, key=lambda e: e[0], reverse=True)[: rules.beam] for s in sentences]
    longest = max((len(words) for ended in best for _, words in ended), default=0)
    nothing = (-math.inf, ())
    full = [[*ended, *[nothing] * (rules.beam - len(ended))] for ended in best]
    rows = [[[*words, *[rules.pad] * (longest - len(words))] for _, words in e] for e in full]
    words_BKT = torch.tensor(rows, dtype=torch.int64, device=device)
    scores_BK = torch.tensor([[score for score, _ in ended] for ended in full], device=device)
    return Translations(
        words_BKT.reshape(len(sentences), rules.beam, longest),
        scores_BK.reshape(len(sentences), rules.beam),
    )


def _check(rules: Rules) -> None:
    require_at_least(1, beam=rules.beam, max_length=rules.max_length)
    if rules.length_penalty < 0:
        raise ConfigError(
            f"length_penalty={rules.length_penalty} would favour short sentences "
            "beyond what probabilities do; give 0 or more, such as 0.6"
        )
    words = {"bos": rules.bos, "eos": rules.eos, "pad": rules.pad}
    if len(set(words.values())) < len(words):
        raise ConfigError(
            f"{', '.join(f'{name}={word}' for name, word in words.items())}: "
            "the words for beginning, end and padding have to be three"
        )
