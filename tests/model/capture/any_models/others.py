"""More models of the usual libraries, and what is built otherwise than those."""

from typing import Any

import torch
import transformers

from .filling import HRNET
from .handwritten import DenseNet, InPlaceGlue, NanoGPT, Recurrent, TorchTransformer, sequential
from .made import (
    IMAGE_SIZE,
    NUM_WORDS,
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

EXPERTS: Sizes = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK: Sizes = EXPERTS | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2}
DEEPSEEK |= {"topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 8}
DEEPSEEK |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
DISENTANGLED: Sizes = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
DISENTANGLED |= {"position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": True}
PYRAMID: Sizes = {"num_encoder_blocks": 2, "depths": [2, 2], "sr_ratios": [2, 1]}
PYRAMID |= {"hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2], "num_labels": 3}
PYRAMID |= {"num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16}
SOUND: Sizes = TOKENS | SIZES | {"conv_dim": [16, 16], "conv_stride": [5, 4]}
SOUND |= {"conv_kernel": [10, 4], "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
SOUND |= {"apply_spec_augment": False}
MASKED_SOUND: Sizes = {"apply_spec_augment": True, "mask_time_length": 2, "mask_time_prob": 0.4}
MASKED_SOUND |= {"mask_feature_length": 4, "mask_feature_prob": 0.3, "layerdrop": 0.0}
SPARSE: Sizes = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}
SPARSE |= {"max_position_embeddings": 64}
TWO_KINDS = ["sliding_attention", "full_attention"]
GEMMA4: Sizes = {"num_hidden_layers": 6, "num_kv_shared_layers": 3, "layer_types": TWO_KINDS * 3}
GEMMA4 |= {"sliding_window": 4, "global_head_dim": 8, "hidden_size_per_layer_input": 8}
GEMMA4 |= {"vocab_size_per_layer_input": NUM_WORDS}
MAMBA2: Sizes = {"hidden_size": 16, "num_hidden_layers": 5, "num_heads": 4, "head_dim": 8}
MAMBA2 |= {"state_size": 8, "n_groups": 2, "chunk_size": 4}
DROPPED: Sizes = {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}
OTHER_LAYERS = "other layers at every step"
OF_NUMPY = "masks of NumPy's random numbers"
CONVOLVED: Sizes = {"hidden_sizes": [8, 16], "depths": [2, 2], "num_hidden_layers": 2}
BASIC = CONVOLVED | {"embedding_size": 8, "layer_type": "basic"}


def llava() -> Made:
    num_patches, image_word = (IMAGE_SIZE // 8) ** 2, NUM_WORDS - 1
    text = transformers.LlamaConfig(**{**TEXT, "num_hidden_layers": 3})
    vision = transformers.CLIPVisionConfig(
        **{**SIZES, "num_hidden_layers": 3}, image_size=IMAGE_SIZE, patch_size=8
    )
    options: dict[str, Any] = {"image_token_index": image_word, "image_seq_length": num_patches}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, **options)

    def inputs(batch: int) -> dict[str, Any]:
        shown = torch.full((batch, num_patches), image_word)
        said = words(batch).clamp(max=image_word - 1)
        return {"input_ids": torch.cat([shown, said], 1), **image(batch)}

    return transformers.LlavaForConditionalGeneration(config), inputs


def long_words(batch: int) -> dict[str, Any]:
    return {"input_ids": words(batch, 36)}


def sound(batch: int) -> dict[str, Any]:
    return {"input_values": numbers(400)(batch)}


def recognizer(**options: Any) -> Any:
    return hugging_face("Wav2Vec2", "ForCTC", SOUND, sound, **options)


def big_bird() -> Any:
    return hugging_face("BigBird", "ForMaskedLM", TEXT, long_words, **SPARSE)


def gemma4() -> Any:
    return decoder("Gemma4", config="Gemma4Text", inputs=uncached, **GEMMA4)


def unmasked(batch: int) -> dict[str, Any]:
    return {"input_ids": words(batch)}


def two_sided(family: str, **options: Any) -> Any:
    return hugging_face(family, "ForConditionalGeneration", TWO_SIDED, both_sides, **options)


def translated(batch: int) -> dict[str, Any]:
    """Give words for an encoder, and labels, which the model shifts for its decoder."""
    return masked(batch, labels=words(batch, 5), use_cache=False)


def shifting(family: str, head: str = "ForConditionalGeneration") -> Any:
    return hugging_face(family, head, TWO_SIDED, translated)


OTHERS = (
    AnyModel("nanoGPT", lambda: (NanoGPT(), words), "tied, attention with dropout"),
    AnyModel("DenseNet", lambda: (DenseNet(), pixels(8)), "every value goes to all that follow"),
    AnyModel("LSTM", lambda: (Recurrent(), words), "states go from layer to layer"),
    AnyModel("in place", lambda: (InPlaceGlue(), words), "writes into views between blocks"),
    AnyModel(
        "nn.Transformer",
        lambda: (TorchTransformer(), lambda n: {"source": words(n), "target": words(n, 5)}),
    ),
    HRNET,
    AnyModel("nn.Sequential", lambda: (sequential(), words)),
    AnyModel(
        "gpt2, eager", hugging_face("GPT2", "LMHeadModel", TEXT, attn_implementation="eager")
    ),
    AnyModel("llama, eager", decoder("Llama", attn_implementation="eager")),
    AnyModel("albert", encoder("Albert", embedding_size=16), "one layer, called again and again"),
    AnyModel("gpt-neox", decoder("GPTNeoX")),
    AnyModel("opt", decoder("OPT", ffn_dim=48)),
    AnyModel("bloom", decoder("Bloom", n_layer=5, n_head=4)),
    AnyModel("falcon", hugging_face("Falcon", "ForCausalLM", TEXT)),
    AnyModel("phi3", decoder("Phi3")),
    AnyModel("gemma2", decoder("Gemma2")),
    AnyModel("gemma3", decoder("Gemma3", config="Gemma3Text", sliding_window=4)),
    AnyModel("gemma4", gemma4(), "layers share keys and values in a UserDict"),
    AnyModel("olmo2", decoder("Olmo2")),
    AnyModel("cohere", decoder("Cohere")),
    AnyModel("granite", decoder("Granite")),
    AnyModel("glm", decoder("Glm")),
    AnyModel("lfm2", decoder("Lfm2"), "convolutions and attention by turns"),
    AnyModel("biogpt", hugging_face("BioGpt", "ForCausalLM", TEXT)),
    AnyModel("olmoe", decoder("Olmoe", num_experts=4, num_experts_per_tok=2)),
    AnyModel("qwen3-moe", decoder("Qwen3Moe", **EXPERTS, num_experts=4)),
    AnyModel("deepseek-v3", decoder("DeepseekV3", **DEEPSEEK)),
    AnyModel("gpt-oss", decoder("GptOss", num_local_experts=4, num_experts_per_tok=2)),
    AnyModel("distilbert", encoder("DistilBert")),
    AnyModel("roberta", encoder("Roberta")),
    AnyModel("mpnet", encoder("MPNet")),
    AnyModel("fnet", encoder("FNet", inputs=unmasked), "Fourier transforms, no attention"),
    AnyModel("deberta-v2", encoder("DebertaV2", **DISENTANGLED)),
    AnyModel("modernbert", encoder("ModernBert")),
    AnyModel("electra", encoder("Electra", embedding_size=16)),
    AnyModel("bart", two_sided("Bart")),
    AnyModel("bart, layers dropped", two_sided("Bart", **DROPPED), OTHER_LAYERS),
    AnyModel("mbart", two_sided("MBart")),
    AnyModel("marian", shifting("Marian", "MTModel"), "labels shifted in place"),
    AnyModel("pegasus", shifting("Pegasus"), "labels shifted in place"),
    AnyModel("m2m100", shifting("M2M100"), "labels shifted in place"),
    AnyModel("convnext", classifier("ConvNext", **CONVOLVED, drop_path_rate=0.2, patch_size=4)),
    AnyModel("resnet of transformers", classifier("ResNet", **BASIC), "BatchNorm"),
    AnyModel("segformer", hugging_face("Segformer", "ForSemanticSegmentation", PYRAMID, image)),
    AnyModel("beit", classifier("Beit", drop_path_rate=0.2)),
    AnyModel("deit", classifier("DeiT")),
    AnyModel("dinov2", classifier("Dinov2")),
    AnyModel("mamba2", hugging_face("Mamba2", "ForCausalLM", TOKENS | MAMBA2, uncached)),
    AnyModel("wav2vec2", recognizer(layerdrop=0.3), OTHER_LAYERS),
    AnyModel("wav2vec2, SpecAugment", recognizer(**MASKED_SOUND), OF_NUMPY),
    AnyModel("big bird", big_bird(), "blocks of attention by NumPy's random numbers"),
    AnyModel("llava", llava, "an image among the words"),
)
