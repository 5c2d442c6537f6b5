"""Train one vocabulary of subwords for all languages with the library tokenizers.

It is byte-level byte-pair encoding: text becomes UTF-8 bytes, and frequent pairs become one token.
It encodes every text in every script, so <|unknown|> never occurs.  Tokens do not cross the
borders of words, numbers and punctuation; combining marks belong to words, as Indic scripts need.

For translation, text is put into NFC form and stripped.  A space is put before it, so that a word
has the same token at the start of a text as inside.  A source is

    <de> tokens of the text <|end|>

where the tag <de> is its language (all translations have the same language).  The plain text of a
language model is not normalised: decoding its tokens returns the same characters.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from penstock.errors import CheckpointError, ConfigError
from penstock_recipes.data import optional_library

from .corpus import TextPart, check_languages
from .sampling import FOLLOW_UPS_TEMPERATURE, epoch_samples

PAD, BOS, EOS, UNK = range(4)
SPECIAL_TOKENS = ("<|pad|>", "<|begin|>", "<|end|>", "<|unknown|>")
"""Their bars keep them apart from language tags: bos is a language code."""
_NUM_BYTES = 256
_FEWEST_TIMES = 2
"""Least frequency of a pair that becomes a token."""
_AT_ONCE = 10_000
"""Number of texts that are encoded together."""
_PIECES = r" ?[\p{L}\p{M}]+| ?\p{N}+| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"
"""Matches the pieces of a text; no token crosses their borders."""


class Vocabulary:
    """Subwords and language tags by number; equal vocabularies have equal digests."""

    def __init__(self, tokenizer: Any) -> None:
        """Wrap a tokenizer of the library tokenizers, made by `train_vocabulary`."""
        tokenizer.encode_special_tokens = True  # "<|end|>" in a text is text
        self._tokenizer = tokenizer
        self.size: int = tokenizer.get_vocab_size()
        added = sorted(tokenizer.get_added_tokens_decoder().items())
        self.tags: Mapping[str, int] = {
            token.content[1:-1]: number
            for number, token in added
            if token.content not in SPECIAL_TOKENS
        }
        tokens = json.dumps([tokenizer.id_to_token(number) for number in range(self.size)])
        self.digest: str = hashlib.blake2b(tokens.encode(), digest_size=16).hexdigest()

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages that have a tag."""
        return tuple(self.tags)

    def encode(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Yield the tokens of each text, without tag and end."""
        for start in range(0, len(texts), _AT_ONCE):
            batch = list(texts[start : start + _AT_ONCE])
            for encoding in self._tokenizer.encode_batch(batch, add_special_tokens=False):
                yield encoding.ids

    def encode_sources(self, texts: Sequence[str], language: str) -> Iterator[list[int]]:
        """Yield the tokens of source texts: tag, text, end.

        Raises:
            ConfigError: there is no tag for the language.
        """
        check_languages([language], self.tags, "the vocabulary")
        return ([self.tags[language], *ids, EOS] for ids in self.encode(texts))

    def encode_targets(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Yield the tokens of translations: text, end."""
        return ([*ids, EOS] for ids in self.encode(texts))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of tokens up to the first end; invalid bytes become �."""
        text: str = self._tokenizer.decode(list(itertools.takewhile(lambda n: n != EOS, ids)))
        return text

    def save(self, path: Path) -> None:
        """Write the vocabulary as one JSON file, which the library tokenizers can read too.

        Raises:
            ConfigError: there is another vocabulary, or something else, at `path`.
        """
        if path.exists():
            if self._is_in(path):
                return
            raise ConfigError(
                f"{path} exists already and is not this vocabulary; it is never overwritten, so "
                "choose another name"
            )
        unfinished = path.with_name(f".{path.name}.unfinished")
        text = json.dumps(json.loads(self._tokenizer.to_str()), ensure_ascii=False)
        unfinished.write_text(text + "\n", encoding="utf-8")
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a vocabulary that `save` wrote.

        Raises:
            ConfigError: there is no such file, or it holds no vocabulary of Penstock's.
        """
        tokenizers = _library()
        if not path.is_file():
            raise ConfigError(f"{path} does not exist; give the JSON file of a vocabulary")
        try:
            tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises no narrower class
            raise ConfigError(f"{path} holds no vocabulary: {error}") from None
        added = tokenizer.get_added_tokens_decoder()
        if any(n not in added or added[n].content != t for n, t in enumerate(SPECIAL_TOKENS)):
            raise ConfigError(
                f"{path} holds a vocabulary whose first tokens are not "
                f"{' '.join(SPECIAL_TOKENS)}; give one that Penstock trained"
            )
        return cls(tokenizer)

    def check_fits(self, *, size: int, digest: str) -> None:
        """Check that this is the vocabulary of a checkpoint.

        Raises:
            CheckpointError: it has another size or digest.
        """
        if self.size != size:
            raise CheckpointError(
                f"the checkpoint was trained with a vocabulary of {size:,} tokens, and this one "
                f"has {self.size:,}; give the one that was saved beside the checkpoint"
            )
        if self.digest != digest:
            raise CheckpointError(
                f"the checkpoint was trained with the vocabulary {digest}, and this one, with as "
                f"many tokens, is {self.digest}; give the one that was saved beside the checkpoint"
            )

    def _is_in(self, path: Path) -> bool:
        try:
            return Vocabulary.load(path).digest == self.digest
        except ConfigError:
            return False


def train_vocabulary(
    part: TextPart,
    size: int,
    *,
    temperature: float = FOLLOW_UPS_TEMPERATURE,
    num_pairs: int | None = None,
    seed: int = 0,
) -> Vocabulary:
    """Train one vocabulary of at most `size` tokens on both sides of the pairs of all languages.

    temperature: Temperature of language sampling, so that languages with little text count.
    num_pairs: Number of sampled pairs; by default that of the corpus.

    Raises:
        ConfigError: tokenizers is not installed, there is no text, or `size` is too small for
            tags and single bytes.
    """
    # Sample pairs as in training, and give both sides to the trainer.
    languages = sorted(part)
    counts = torch.tensor([len(part[language]) for language in languages], dtype=torch.int64)
    drawn = epoch_samples(
        torch.repeat_interleave(torch.arange(len(languages)), counts),
        temperature=temperature,
        num_places=num_pairs if num_pairs is not None else int(counts.sum()),
        seed=seed,
        epoch=0,
    ).tolist()
    sources = [text for language in languages for text in part[language].sources]
    targets = [text for language in languages for text in part[language].targets]
    texts = (text for n in drawn for text in (sources[n], targets[n]))
    return _train(texts, size, languages, for_translation=True)


def train_text_vocabulary(text: str, size: int) -> Vocabulary:
    """Train a vocabulary of at most `size` tokens on one text, without language tags.

    Raises:
        ConfigError: tokenizers is not installed, or `size` is too small for single bytes.
    """
    return _train(text.splitlines(keepends=True), size, [], for_translation=False)


def _train(
    texts: Iterable[str], size: int, languages: Sequence[str], *, for_translation: bool
) -> Vocabulary:
    # Tags and single bytes always have a token.
    library = _library()
    special = [*SPECIAL_TOKENS, *(f"<{language}>" for language in languages)]
    if size < len(special) + _NUM_BYTES:
        raise ConfigError(
            f"a vocabulary of {size} tokens is too small: {len(languages)} language tags, "
            f"{len(SPECIAL_TOKENS)} special tokens and {_NUM_BYTES} bytes need "
            f"{len(special) + _NUM_BYTES}; give more"
        )
    # Byte-pair encoding inside words, numbers and punctuation.
    tokenizer = library.Tokenizer(library.models.BPE(unk_token=SPECIAL_TOKENS[UNK]))
    byte_level = library.pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence(
        [
            library.pre_tokenizers.Split(library.Regex(_PIECES), "isolated"),
            byte_level(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = library.decoders.ByteLevel()
    # Each text to translate starts with a space, which decoding removes.
    if for_translation:
        normalizers, decoders = library.normalizers, library.decoders
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Strip(), normalizers.Prepend(" ")]
        )
        tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=_FEWEST_TIMES,
        special_tokens=special,
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Vocabulary(tokenizer)


def _library() -> Any:
    return optional_library("tokenizers", "a vocabulary of subwords needs", "translation")
