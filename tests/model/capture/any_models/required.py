"""The models that must be cut to the bit: small configurations of the usual libraries."""

from collections.abc import Callable
from typing import Any

import transformers

from .handwritten import Branching, ResNet, UNet
from .made import (
    IMAGE_SIZE,
    SIZES,
    TEXT,
    TOKENS,
    TWO_SIDED,
    AnyModel,
    Made,
    Sizes,
    both_sides,
    classifier,
    decoder,
    encoder,
    hugging_face,
    image,
    masked,
    numbers,
    pixels,
    uncached,
    words,
)

T5: Sizes = TOKENS | {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4}
T5 |= {"num_decoder_layers": 4, "num_heads": 4, "decoder_start_token_id": 0}
SWIN: Sizes = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
SWIN |= {"image_size": 32, "patch_size": 4, "num_labels": 3}
MAMBA: Sizes = TOKENS | {"hidden_size": 16, "num_hidden_layers": 5, "state_size": 4}


def image_of_32(batch: int) -> dict[str, Any]:
    return {"pixel_values": pixels(32)(batch)}


def clip() -> Made:
    text = {**TEXT, "num_hidden_layers": 3}
    vision = {**SIZES, "num_hidden_layers": 3, "image_size": IMAGE_SIZE, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    return transformers.CLIPModel(config), lambda batch: {**masked(batch), **image(batch)}


def whisper(layerdrop: float = 0.0) -> Callable[[], Made]:
    features = numbers(8, 20)

    def inputs(batch: int) -> dict[str, Any]:
        decoded = {"decoder_input_ids": words(batch, 5), "use_cache": False}
        return {"input_features": features(batch), **decoded}

    options: Sizes = {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16}
    options |= {"encoder_layerdrop": layerdrop, "decoder_layerdrop": layerdrop}
    return hugging_face("Whisper", "ForConditionalGeneration", TWO_SIDED, inputs, **options)


OF_TRANSFORMERS = (
    AnyModel("gpt2", hugging_face("GPT2", "LMHeadModel", {**TEXT, "n_positions": 32})),
    AnyModel("llama", decoder("Llama")),
    AnyModel("llama, tied", decoder("Llama", tie_word_embeddings=True)),
    AnyModel("mistral", decoder("Mistral")),
    AnyModel("qwen2", decoder("Qwen2")),
    AnyModel("qwen3", decoder("Qwen3")),
    AnyModel("mixtral", decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2)),
    AnyModel("bert", encoder("Bert")),
    AnyModel("t5", hugging_face("T5", "ForConditionalGeneration", T5, both_sides)),
    AnyModel("vit", classifier("ViT")),
    AnyModel("clip", clip),
    AnyModel("swin", hugging_face("Swin", "ForImageClassification", SWIN, image_of_32)),
    AnyModel("whisper", whisper()),
    AnyModel("whisper, layers dropped", whisper(0.5), "other layers at every step"),
    AnyModel("mamba", hugging_face("Mamba", "ForCausalLM", MAMBA, uncached)),
)
REQUIRED = (
    *OF_TRANSFORMERS,
    AnyModel("resnet", lambda: (ResNet(), pixels(16)), "BatchNorm, activations in place"),
    AnyModel("unet", lambda: (UNet(), pixels(16)), "long skips, a branch on shapes"),
    AnyModel("branching", lambda: (Branching(), words), "goes by the values"),
)
