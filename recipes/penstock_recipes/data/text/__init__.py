"""Text: parallel text in many languages for translation, and plain text for language models.

load_parallel, load_names        pairs of texts, split for training, validation and testing
    └► train_vocabulary          one vocabulary of subwords for all languages
    └► encode_part               the pairs as tokens
          └► epoch_steps         the pairs of each step of an epoch
          └► collate             pairs as padded tensors
    └► score_translations        BLEU and chrF of translations
load_text                        a file, split for training and validation
    └► train_text_vocabulary     subwords of one text; or ByteVocabulary, which needs no training
    └► text_windows              tokens in windows of one length
"""

from .batches import BatchPlan, Step, epoch_steps, parts_by_length
from .corpus import ParallelCorpus, TextPairs, TextPart
from .encode import EncodedPairs, TextBatch, collate, encode_part, num_real_tokens
from .names import NAME_KINDS, NAME_LANGUAGES, load_names
from .parallel import load_parallel
from .plain_text import (
    ByteVocabulary,
    TextSplit,
    TextVocabulary,
    Windows,
    load_text,
    text_windows,
)
from .sampling import FOLLOW_UPS_TEMPERATURE, MULTILINGUAL_BERT_TEMPERATURE, language_shares
from .scores import Score, Scores, compare, identity_scores, score_translations
from .vocabulary import (
    BOS,
    EOS,
    PAD,
    UNK,
    Vocabulary,
    train_text_vocabulary,
    train_vocabulary,
)

__all__ = [
    "BOS",
    "EOS",
    "FOLLOW_UPS_TEMPERATURE",
    "MULTILINGUAL_BERT_TEMPERATURE",
    "NAME_KINDS",
    "NAME_LANGUAGES",
    "PAD",
    "UNK",
    "BatchPlan",
    "ByteVocabulary",
    "EncodedPairs",
    "ParallelCorpus",
    "Score",
    "Scores",
    "Step",
    "TextBatch",
    "TextPairs",
    "TextPart",
    "TextSplit",
    "TextVocabulary",
    "Vocabulary",
    "Windows",
    "collate",
    "compare",
    "encode_part",
    "epoch_steps",
    "identity_scores",
    "language_shares",
    "load_names",
    "load_parallel",
    "load_text",
    "num_real_tokens",
    "parts_by_length",
    "score_translations",
    "text_windows",
    "train_text_vocabulary",
    "train_vocabulary",
]
