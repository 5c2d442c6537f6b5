"""The networks of a recipe: `[model]`."""

from typing import Annotated, Literal

from pydantic import Field

from .section import Above0, Count, Section, Share


class Residual(Section):
    """A small residual convolution network, for images of any size from 2 x 2."""

    name: Literal["residual"]
    """residual: a small residual convolution network."""
    num_blocks: Annotated[int, Field(ge=0)] = 4
    """Residual blocks of two convolutions each."""
    width: Count = 32
    """Channels of the first half of the blocks; the second half has twice as many."""
    dropout: Share = 0.2
    """Dropout rate of the features before the head."""


class AmoebaNet(Section):
    """AmoebaNet (Real et al. 2019), the network of GPipe's image classification."""

    name: Literal["amoebanet"]
    """amoebanet: cells found by evolution, of two inputs each."""
    genotype: Literal["b", "d"] = "d"
    """The cells: b, of the ImageNet result, or d, of the scaling study."""
    num_layers: Count = 18
    """L, normal cells, in three stacks with a reduction between."""
    num_filters: Count = 256
    """D, filters of the first stack of normal cells."""
    dropout: Share = 0.5
    """Dropout rate of the features before the head."""
    drop_path: Share = 0.3
    """Final drop rate of operations in cells; it rises from 0 linearly."""
    auxiliary_weight: Annotated[float, Field(ge=0)] = 0.4
    """Weight of the auxiliary head's loss; 0: no such head."""
    stem: Literal["imagenet", "small"] = "imagenet"
    """imagenet: the first layers divide each side by 8; small: they keep the resolution."""
    norm_decay: Share = 0.9
    """Share of BatchNorm's running statistics that is kept in each step."""
    norm_epsilon: Above0 = 1e-5
    """Added to BatchNorm's variances."""


class _Transformer(Section):
    """The keys of all Transformers."""

    dropout: Share = 0.1
    """Dropout rate of embeddings, of attention weights, and after attention and feed-forward
    layers."""


class TranslationTransformer(_Transformer):
    """GPipe's T(L, H, A): L encoder and L decoder layers, for translation."""

    name: Literal["translation_transformer"]
    """translation_transformer: an encoder and a decoder."""
    num_layers: Count = 6
    """L, layers of the encoder, and of the decoder."""
    ff_width: Count = 8192
    """H, the width inside feed-forward layers."""
    num_heads: Count = 16
    """A, attention heads."""
    width: Count = 1024
    """The width between layers."""
    head_width: Count = 64
    """The width of one attention head."""
    tied: Literal["all", "decoder", "nothing"] = "all"
    """The matrices that share one weight: source words, target words and output, or the last
    two."""
    logit_clip: Above0 | None = None
    """Clamp the logits to this magnitude while training; left out: never."""
    depth_scaled: bool = True
    """Start feed-forward layers smaller in deeper models (Fixup)."""


class Gpt(_Transformer):
    """A decoder of the GPT family, for language modelling."""

    name: Literal["gpt"]
    """gpt: a decoder with causal attention."""
    num_layers: Count = 12
    """Blocks of attention and feed-forward."""
    width: Count = 768
    """The width between layers."""
    num_heads: Count = 12
    """Attention heads; they divide the width."""
    tied: bool = True
    """Share one matrix between input words and output."""


ModelSection = Residual | AmoebaNet | TranslationTransformer | Gpt
