"""Beam search for the best translations of a batch of sentences.

Shapes: B sentences, R of them unfinished, K beams of each, V words; N = R * K rows, with the beams
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
"""(source (B, S), target (B, T)) -> logits (B, T, V), such as a model's forward."""


class Decoder(Protocol):
    """The state of a search, with a row for each beam."""

    def next(self, words_N: Tensor) -> tuple[Tensor, Self]:
        """Append a word to each row; return the logits (N, V) of the next word."""

    def rows(self, rows_N: Tensor) -> Self:
        """Return row rows_N[n] as row n, for each n."""


@dataclass(frozen=True, slots=True)
class Caching:
    """Decodes with cached keys and values: each word is computed once, and so is the source."""

    model: TranslationTransformer
    state: DecodingState

    def next(self, words_N: Tensor) -> tuple[Tensor, "Caching"]:
        """Append a word to each row."""
        logits_NV, state = self.model.next_word(words_N, self.state)
        return logits_NV, Caching(self.model, state)

    def rows(self, rows_N: Tensor) -> "Caching":
        """Select rows."""
        return Caching(self.model, self.state.rows(rows_N))


@dataclass(frozen=True, slots=True)
class Recomputing:
    """Decodes with a plain forward, which recomputes source and target for each word."""

    forward: Forward
    source_NS: Tensor
    target_NT: Tensor

    def next(self, words_N: Tensor) -> tuple[Tensor, "Recomputing"]:
        """Append a word to each row."""
        target_NT = torch.cat((self.target_NT, words_N.unsqueeze(1)), dim=1)
        logits_NTV = self.forward(self.source_NS, target_NT)
        return logits_NTV[:, -1], Recomputing(self.forward, self.source_NS, target_NT)

    def rows(self, rows_N: Tensor) -> "Recomputing":
        """Select rows."""
        source_NS, target_NT = self.source_NS[rows_N], self.target_NT[rows_N]
        return Recomputing(self.forward, source_NS, target_NT)


@dataclass(frozen=True, slots=True)
class Translations:
    """The best K translations of each sentence, best first.

    Rows have no end word, and are padded.  If fewer than K were found, the rest is padding with a
    score of -inf.
    """

    words_BKT: Tensor
    scores_BK: Tensor

    @property
    def best_BT(self) -> Tensor:
        """The best translation of each sentence."""
        return self.words_BKT[:, 0]


@dataclass(frozen=True, slots=True)
class Beam:
    """An unfinished translation: the row of its state, its words, its log-probability.

    A score of -inf marks an empty place.
    """

    row: int
    words: tuple[int, ...]
    score: float


@dataclass(slots=True)
class Sentence:
    """The translations of one sentence: finished ones as (score, words), and unfinished beams."""

    ended: list[tuple[float, tuple[int, ...]]]
    beams: list[Beam]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The parameters of a search."""

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

    A `TranslationTransformer` encodes the source once and caches keys and values.  Any other
    function from (source, target) to logits works too, such as a pipeline: `lambda *batch:
    pipe.eval_step(batch)`.  It recomputes all words for each new one.  A module is in evaluation
    mode meanwhile.

    Each step looks at the `beam` best continuations of a sentence's beams.  Those that end the
    sentence are finished; the best `beam` unfinished ones continue.  A sentence is done when
    `beam` translations are finished.  After `max_length` words, the end included, every beam is
    ended.  `bos` and `pad` are never produced.

    Translations are ranked by log-probability / ((5 + length) / 6) ** length_penalty; the length
    includes the end.  The default 0.6 is from Vaswani et al. 2017, as GPipe's paper gives none; 0
    compares probabilities, which favours short sentences.  There is no coverage penalty.

    Raises:
        ConfigError: `beam` or `max_length` is below 1, the penalty is negative, two of `bos`,
            `eos` and `pad` are equal, or the model takes fewer than `max_length` words.
    """
    rules = Rules(
        beam=beam, length_penalty=length_penalty, max_length=max_length, bos=bos, eos=eos, pad=pad
    )
    _check(rules)
    with torch.no_grad(), evaluating(model):
        decoder = _start(model, source_BS, max_length)
        sentences = _search(decoder, rules, source_BS)
    return _as_tensors(sentences, rules, source_BS.device)


@contextmanager
def evaluating(model: object) -> Iterator[None]:
    """Put a module into evaluation mode, and restore the mode of its parts afterwards."""
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
    # Begin with one beam for each sentence, and empty places for the others.
    places_B = torch.arange(len(source_BS), device=source_BS.device)
    decoder = decoder.rows(places_B.repeat_interleave(rules.beam))
    scores = [0.0, *[-math.inf] * (rules.beam - 1)]
    sentences = [
        Sentence([], [Beam(n * rules.beam + k, (), score) for k, score in enumerate(scores)])
        for n in range(len(source_BS))
    ]
    words_N = source_BS.new_full((len(sentences) * rules.beam,), rules.bos)
    active = sentences
    for length in range(1, rules.max_length + 1):
        # Extend the beams by a word, and drop the sentences that are done.
        logits_NV, decoder = decoder.next(words_N)
        _extend(active, logits_NV, rules, is_last=length == rules.max_length)
        active = [sentence for sentence in active if len(sentence.ended) < rules.beam]
        if not active or length == rules.max_length:
            break
        # Keep the rows of the beams that continue.
        beams = [beam for sentence in active for beam in sentence.beams]
        decoder = decoder.rows(places_B.new_tensor([beam.row for beam in beams]))
        words_N = source_BS.new_tensor([beam.words[-1] for beam in beams])
    return sentences


def _extend(active: list[Sentence], logits_NV: Tensor, rules: Rules, *, is_last: bool) -> None:
    """Extend or finish the beams of each sentence by the best continuations."""
    # Take twice the beams, as all of the best may end the sentence.
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
    """Compute log-probabilities; -inf for forbidden words."""
    precise = torch.promote_types(logits_NV.dtype, torch.float32)
    scores_NV = logits_NV.to(precise).log_softmax(1)
    forbidden_V = torch.full_like(scores_NV[0], is_last, dtype=torch.bool)
    forbidden_V[[rules.bos, rules.pad]] = True
    forbidden_V[rules.eos] = False
    return scores_NV.masked_fill(forbidden_V, -math.inf)


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
