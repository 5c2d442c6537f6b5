"""What a model under test is, what it is called with, and the sizes that they share."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

transformers.logging.set_verbosity_error()

NUM_WORDS, LENGTH, IMAGE_SIZE = 61, 7, 16
Inputs = Callable[[int], Any]
"""Batch size -> what the model is called with."""
Made = tuple[nn.Module, Inputs]

Sizes = dict[str, Any]

TOKENS: Sizes = {"vocab_size": NUM_WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: Sizes = {"hidden_size": 32, "intermediate_size": 48}
SIZES |= {"num_hidden_layers": 5, "num_attention_heads": 4}
TEXT: Sizes = {**TOKENS, **SIZES, "max_position_embeddings": 32}
DECODER: Sizes = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
IMAGES: Sizes = {**SIZES, "image_size": IMAGE_SIZE, "patch_size": 8, "num_labels": 3}
TWO_SIDED: Sizes = TOKENS | {"decoder_start_token_id": 1, "d_model": 32}
TWO_SIDED |= {"encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
TWO_SIDED |= {"decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
"""An encoder and a decoder."""


@dataclass(frozen=True, slots=True)
class AnyModel:
    """A model by name; `make` gives the same weights at every call.

    `within` gives what its forward runs in.  `rounding` is the reason why a cut may change the
    last bits; without one, it must not.  `note` is for the table in the documentation.  `routed`:
    its inputs have to travel, and cannot be given to every stage.
    """

    name: str
    build: Callable[[], Made]
    note: str = ""
    rounding: str = ""
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    routed: bool = False

    def make(self) -> Made:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.build()


def words(batch: int, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(batch + length)
    return torch.randint(0, NUM_WORDS, (batch, length), generator=generator)


def numbers(*shape: int) -> Inputs:
    def draw(batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(batch)
        return torch.randn(batch, *shape, generator=generator)

    return draw


def pixels(size: int) -> Inputs:
    return numbers(3, size, size)


def masked(batch: int, **others: Any) -> dict[str, Any]:
    mask = torch.ones(batch, LENGTH, dtype=torch.long)
    return {"input_ids": words(batch), "attention_mask": mask, **others}


def image(batch: int) -> dict[str, Any]:
    return {"pixel_values": pixels(IMAGE_SIZE)(batch)}


def both_sides(batch: int) -> dict[str, Any]:
    return masked(batch, decoder_input_ids=words(batch, 5), use_cache=False)


def uncached(batch: int) -> dict[str, Any]:
    return {"input_ids": words(batch), "use_cache": False}


def hugging_face(
    family: str,
    head: str,
    sizes: Sizes,
    inputs: Inputs = masked,
    *,
    config: str = "",
    **options: Any,
) -> Callable[[], Made]:
    """Make a model of transformers; `config` is the name of its configuration's family."""

    def build() -> Made:
        kind = getattr(transformers, f"{config or family}Config")
        made = getattr(transformers, f"{family}{head}")(kind(**{**sizes, **options}))
        return made, inputs

    return build


def decoder(family: str, **options: Any) -> Callable[[], Made]:
    return hugging_face(family, "ForCausalLM", DECODER, **options)


def encoder(family: str, **options: Any) -> Callable[[], Made]:
    return hugging_face(family, "ForMaskedLM", TEXT, **options)


def classifier(family: str, **options: Any) -> Callable[[], Made]:
    return hugging_face(family, "ForImageClassification", IMAGES, image, **options)
