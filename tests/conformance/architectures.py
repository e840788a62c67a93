"""Small configurations of the architectures in transformers: (model class, configuration, inputs).

The configuration is given as keyword arguments of the model's configuration class; a nested
dictionary is one for a part of the model.  Sizes are multiples of sixteen bytes, since the
grouped matrix products of mixtures of experts ask for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Inputs = Callable[[], dict[str, Any]]


class Architecture(NamedTuple):
    """``inputs`` draws random inputs; ``attention`` overrides the implementation of attention."""

    model: str
    config: dict[str, Any]
    inputs: Inputs
    attention: str | None = None


def text(length: int = 12, **more: Any) -> Inputs:
    """Token ids, two tokens of padding in the second row, and the ids themselves as labels."""

    def inputs() -> dict[str, Any]:
        ids = torch.randint(3, 90, (2, length))
        mask = torch.ones(2, length, dtype=torch.long)
        mask[1, -2:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone(), **more}

    return inputs


def bare_text() -> dict[str, Any]:
    """Token ids and labels, no mask."""
    ids = torch.randint(3, 90, (2, 12))
    return {"input_ids": ids, "labels": ids.clone()}


def image(size: int = 32, **labels: Callable[[], Any]) -> Inputs:
    def inputs() -> dict[str, Any]:
        pixels = torch.randn(2, 3, size, size)
        return {"pixel_values": pixels, **{name: label() for name, label in labels.items()}}

    return inputs


def pair(**more: Any) -> Inputs:
    """An image and a text for each row."""

    def inputs() -> dict[str, Any]:
        both = {**text()(), **image()(), **more}
        del both["labels"]
        return both

    return inputs


def wave(length: int = 1600) -> Inputs:
    return lambda: {"input_values": torch.randn(2, length), "labels": torch.randint(1, 30, (2, 3))}


def mel() -> dict[str, Any]:
    return {"input_features": torch.randn(2, 16, 60), "labels": torch.randint(3, 90, (2, 8))}


def boxes() -> list[dict[str, torch.Tensor]]:
    return [{"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.3]])}] * 2


def one_of_two() -> torch.Tensor:
    return torch.randint(0, 2, (2,))


def segments() -> torch.Tensor:
    return torch.randint(0, 2, (2, 32, 32))


HEADS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TOKENS = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
S = {**HEADS, **TOKENS, "max_position_embeddings": 64}
GROUPED = {**S, "num_key_value_heads": 2}
ENCODER_DECODER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    **TOKENS,
}
T5 = {
    "vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
PATCHES = {**HEADS, "image_size": 32, "patch_size": 8}
SPEECH = {
    **HEADS, "vocab_size": 32, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2,
}  # fmt: skip
CLIP = {"text_config": S, "vision_config": PATCHES, "projection_dim": 32}
SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [1, 2],
    "num_heads": [2, 2],
    "window_size": 4,
}

ARCHITECTURES: dict[str, Architecture] = {
    # text, encoders
    "bert": Architecture("BertForMaskedLM", S, text()),
    "bert, eager attention": Architecture("BertForMaskedLM", S, text(), "eager"),
    "roberta": Architecture("RobertaForMaskedLM", S, text()),
    "electra": Architecture("ElectraForMaskedLM", {**S, "embedding_size": 32}, text()),
    "albert": Architecture("AlbertForMaskedLM", {**S, "embedding_size": 16}, text()),
    "distilbert": Architecture(
        "DistilBertForMaskedLM",
        {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64},
        text(),
    ),
    "deberta": Architecture("DebertaForMaskedLM", {**S, "type_vocab_size": 0, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, text()),
    "deberta-v2": Architecture("DebertaV2ForMaskedLM", {**S, "type_vocab_size": 0}, text()),
    "mpnet": Architecture("MPNetForMaskedLM", S, text()),
    "convbert": Architecture("ConvBertForMaskedLM", {**S, "embedding_size": 32}, text()),
    "squeezebert": Architecture("SqueezeBertForMaskedLM", {**S, "embedding_size": 32, "q_groups": 2, "k_groups": 2, "v_groups": 2, "post_attention_groups": 1, "intermediate_groups": 2, "output_groups": 2}, text()),
    "mobilebert": Architecture("MobileBertForMaskedLM", {**S, "embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32}, text()),
    "fnet": Architecture("FNetForMaskedLM", {**S, "tpu_short_seq_length": 12}, bare_text),
    "funnel": Architecture("FunnelForMaskedLM", {"vocab_size": 99, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48}, text()),
    "longformer": Architecture("LongformerForMaskedLM", {**S, "attention_window": 4}, text()),
    "big_bird": Architecture("BigBirdForMaskedLM", {**S, "attention_type": "original_full"}, text()),
    "big_bird, block sparse": Architecture("BigBirdForMaskedLM", {**S, "attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}, text(48)),
    "nystromformer": Architecture("NystromformerForMaskedLM", {**S, "num_landmarks": 4, "segment_means_seq_len": 12}, bare_text),
    "xlm": Architecture("XLMWithLMHeadModel", {"vocab_size": 99, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}, text()),
    "xlnet": Architecture("XLNetLMHeadModel", {"vocab_size": 99, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}, text()),
    "roformer": Architecture("RoFormerForMaskedLM", {**S, "embedding_size": 32}, text()),
    "esm": Architecture("EsmForMaskedLM", {**S, "mask_token_id": 98}, text()),
    "modernbert": Architecture("ModernBertForMaskedLM", {**S, "attention_dropout": 0.1, "global_attn_every_n_layers": 2, "local_attention": 4}, text()),
    # text, decoders
    "gpt2": Architecture("GPT2LMHeadModel", {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}, text()),
    "gpt2, eager attention": Architecture("GPT2LMHeadModel", {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}, text(), "eager"),
    "gpt_neo": Architecture("GPTNeoForCausalLM", {**S, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4}, text()),
    "gptj": Architecture("GPTJForCausalLM", {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4, "bos_token_id": 1, "eos_token_id": 2}, text()),
    "gpt_neox": Architecture("GPTNeoXForCausalLM", {**S, "attention_dropout": 0.1, "hidden_dropout": 0.1}, text()),
    "gpt_bigcode": Architecture("GPTBigCodeForCausalLM", {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}, text()),
    "opt": Architecture("OPTForCausalLM", {**TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32}, text()),
    "bloom": Architecture("BloomForCausalLM", {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1}, text()),
    "falcon": Architecture("FalconForCausalLM", {**S, "attention_dropout": 0.1}, text()),
    "llama": Architecture("LlamaForCausalLM", {**GROUPED, "attention_dropout": 0.1}, text()),
    "mistral": Architecture("MistralForCausalLM", {**GROUPED, "sliding_window": 4, "attention_dropout": 0.1}, text()),
    "qwen2": Architecture("Qwen2ForCausalLM", {**GROUPED, "attention_dropout": 0.1}, text()),
    "qwen3": Architecture("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}, text()),
    "gemma": Architecture("GemmaForCausalLM", {**GROUPED, "head_dim": 8}, text()),
    "gemma2": Architecture("Gemma2ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}, text()),
    "gemma3": Architecture("Gemma3ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 4}, text()),
    "phi": Architecture("PhiForCausalLM", {**S, "resid_pdrop": 0.1}, text()),
    "phi3": Architecture("Phi3ForCausalLM", {**GROUPED, "resid_pdrop": 0.1}, text()),
    "stablelm": Architecture("StableLmForCausalLM", {**GROUPED, "hidden_dropout": 0.1}, text()),
    "starcoder2": Architecture("Starcoder2ForCausalLM", {**GROUPED, "residual_dropout": 0.1}, text()),
    "cohere": Architecture("CohereForCausalLM", GROUPED, text()),
    "olmo2": Architecture("Olmo2ForCausalLM", GROUPED, text()),
    "glm": Architecture("GlmForCausalLM", {**GROUPED, "head_dim": 8}, text()),
    "granite": Architecture("GraniteForCausalLM", GROUPED, text()),
    "smollm3": Architecture("SmolLM3ForCausalLM", GROUPED, text()),
    "ctrl": Architecture("CTRLLMHeadModel", {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "dff": 48}, text()),
    "codegen": Architecture("CodeGenForCausalLM", {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4, "resid_pdrop": 0.1}, text()),
    "reformer": Architecture("ReformerModelWithLMHead", {"vocab_size": 99, "hidden_size": 32, "num_attention_heads": 2, "attention_head_size": 16, "feed_forward_size": 48, "attn_layers": ["local", "local"], "is_decoder": True, "axial_pos_embds": True, "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16], "local_attn_chunk_length": 4, "max_position_embeddings": 16}, text(16)),
    # mixtures of experts
    "mixtral": Architecture("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}, text()),
    "qwen2_moe": Architecture("Qwen2MoeForCausalLM", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}, text()),
    "qwen3_moe": Architecture("Qwen3MoeForCausalLM", {**GROUPED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, text()),
    "olmoe": Architecture("OlmoeForCausalLM", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}, text()),
    "deepseek_v3": Architecture("DeepseekV3ForCausalLM", {**S, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 32, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}, text()),
    "gpt_oss": Architecture("GptOssForCausalLM", {**GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}, text()),
    "switch_transformers": Architecture("SwitchTransformersForConditionalGeneration", {**T5, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 8}, text()),
    "granitemoe": Architecture("GraniteMoeForCausalLM", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, text()),
    # state spaces and their kin
    "mamba": Architecture("MambaForCausalLM", {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, text()),
    "mamba2": Architecture("Mamba2ForCausalLM", {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 4}, text()),
    "rwkv": Architecture("RwkvForCausalLM", {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}, bare_text),
    "recurrent_gemma": Architecture("RecurrentGemmaForCausalLM", {**S, "num_key_value_heads": 2, "attention_window_size": 4, "block_types": ["recurrent", "attention"]}, text()),
    "jamba": Architecture("JambaForCausalLM", {**GROUPED, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4, "mamba_d_state": 4, "use_mamba_kernels": False}, text()),
    "falcon_mamba": Architecture("FalconMambaForCausalLM", {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, text()),
    # text, encoder and decoder
    "t5": Architecture("T5ForConditionalGeneration", T5, text()),
    "mt5": Architecture("MT5ForConditionalGeneration", T5, text()),
    "longt5": Architecture("LongT5ForConditionalGeneration", {**T5, "local_radius": 3, "encoder_attention_type": "local"}, text()),
    "bart": Architecture("BartForConditionalGeneration", ENCODER_DECODER, text()),
    "mbart": Architecture("MBartForConditionalGeneration", ENCODER_DECODER, text()),
    "pegasus": Architecture("PegasusForConditionalGeneration", ENCODER_DECODER, text()),
    "marian": Architecture("MarianMTModel", ENCODER_DECODER, text()),
    "blenderbot": Architecture("BlenderbotForConditionalGeneration", ENCODER_DECODER, text()),
    "m2m_100": Architecture("M2M100ForConditionalGeneration", ENCODER_DECODER, text()),
    "led": Architecture("LEDForConditionalGeneration", {**{k: v for k, v in ENCODER_DECODER.items() if k != "max_position_embeddings"}, "attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}, text()),
    "prophetnet": Architecture("ProphetNetForConditionalGeneration", {"vocab_size": 99, "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64}, text()),
    # vision
    "vit": Architecture("ViTForImageClassification", {**PATCHES, "hidden_dropout_prob": 0.1}, image(labels=one_of_two)),
    "deit": Architecture("DeiTForImageClassification", PATCHES, image(labels=one_of_two)),
    "beit": Architecture("BeitForImageClassification", {**PATCHES, "drop_path_rate": 0.1}, image(labels=one_of_two)),
    "dinov2": Architecture("Dinov2ForImageClassification", {**PATCHES, "drop_path_rate": 0.1}, image(labels=one_of_two)),
    "resnet": Architecture("ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}, image(labels=one_of_two)),
    "regnet": Architecture("RegNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8}, image(labels=one_of_two)),
    "convnext": Architecture("ConvNextForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.1}, image(labels=one_of_two)),
    "convnextv2": Architecture("ConvNextV2ForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.1}, image(labels=one_of_two)),
    "swin": Architecture("SwinForImageClassification", SWIN, image(labels=one_of_two)),
    "swinv2": Architecture("Swinv2ForImageClassification", SWIN, image(labels=one_of_two)),
    "mobilenet_v2": Architecture("MobileNetV2ForImageClassification", {"image_size": 32, "depth_multiplier": 0.25}, image(labels=one_of_two)),
    "mobilevit": Architecture("MobileViTForImageClassification", {"image_size": 64, "hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16], "num_attention_heads": 2}, image(64, labels=one_of_two)),
    "efficientnet": Architecture("EfficientNetForImageClassification", {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320}, image(labels=one_of_two)),
    "segformer": Architecture("SegformerForSemanticSegmentation", {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 16], "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [2, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16}, image(labels=segments)),
    "poolformer": Architecture("PoolFormerForImageClassification", {"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3], "strides": [2, 2], "padding": [1, 1]}, image(labels=one_of_two)),
    "pvt": Architecture("PvtForImageClassification", {"image_size": 32, "num_encoder_blocks": 2, "depths": [1, 1], "sequence_reduction_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [4, 2], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}, image(labels=one_of_two)),
    "levit": Architecture("LevitForImageClassification", {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [8, 8, 8]}, image(64, labels=one_of_two)),
    "vit_mae": Architecture("ViTMAEForPreTraining", {**PATCHES, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 32}, image()),
    "dpt": Architecture("DPTForSemanticSegmentation", {**PATCHES, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8, "is_hybrid": False}, image(labels=segments)),
    "yolos": Architecture("YolosForObjectDetection", {**HEADS, "image_size": [32, 32], "patch_size": 8, "num_detection_tokens": 4, "num_labels": 3}, image(labels=boxes)),
    "detr": Architecture("DetrForObjectDetection", {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_queries": 4, "num_labels": 3, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "out_features": ["stage2"]}}, image(labels=boxes)),
    "videomae": Architecture("VideoMAEForVideoClassification", {**PATCHES, "num_frames": 4, "tubelet_size": 2}, lambda: {"pixel_values": torch.randn(2, 4, 3, 32, 32), "labels": one_of_two()}),
    # audio
    "wav2vec2": Architecture("Wav2Vec2ForCTC", {**SPEECH, "mask_time_prob": 0.0}, wave()),
    "wav2vec2, masked": Architecture("Wav2Vec2ForCTC", {**SPEECH, "mask_time_prob": 0.5, "mask_time_length": 2}, wave()),
    "hubert": Architecture("HubertForCTC", {**SPEECH, "mask_time_prob": 0.0}, wave()),
    "wavlm": Architecture("WavLMForCTC", {**SPEECH, "mask_time_prob": 0.0}, wave()),
    "whisper": Architecture("WhisperForConditionalGeneration", {**ENCODER_DECODER, "num_mel_bins": 16, "max_source_positions": 30, "max_target_positions": 64}, mel),
    "speech_to_text": Architecture("Speech2TextForConditionalGeneration", {**ENCODER_DECODER, "input_feat_per_channel": 16, "conv_channels": 16, "max_source_positions": 60, "max_target_positions": 64}, lambda: {"input_features": torch.randn(2, 60, 16), "labels": torch.randint(3, 90, (2, 8))}),
    "audio-spectrogram-transformer": Architecture("ASTForAudioClassification", {**HEADS, "patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 24, "num_mel_bins": 16}, lambda: {"input_values": torch.randn(2, 24, 16), "labels": one_of_two()}),
    "encodec": Architecture("EncodecModel", {"num_filters": 4, "hidden_size": 16, "codebook_size": 16, "codebook_dim": 16, "upsampling_ratios": [2, 2], "num_residual_layers": 1, "num_lstm_layers": 1}, lambda: {"input_values": torch.randn(2, 1, 240)}),
    # more than one modality
    "clip": Architecture("CLIPModel", CLIP, pair(return_loss=True)),
    "siglip": Architecture("SiglipModel", {"text_config": S, "vision_config": PATCHES}, pair(return_loss=True)),
    "blip": Architecture("BlipForConditionalGeneration", {"text_config": {**S, "projection_dim": 32, "encoder_hidden_size": 32}, "vision_config": PATCHES, "projection_dim": 32}, lambda: {**text()(), **image()()}),
    "vilt": Architecture("ViltForQuestionAnswering", {**S, **PATCHES, "num_labels": 3}, lambda: {**pair()(), "labels": torch.rand(2, 3)}),
    "llava": Architecture("LlavaForConditionalGeneration", {"text_config": {"model_type": "llama", **GROUPED}, "vision_config": {"model_type": "clip_vision_model", **PATCHES}, "image_token_index": 95, "vision_feature_layer": -1}, lambda: with_image_tokens(95, 16)),
    "paligemma": Architecture("PaliGemmaForConditionalGeneration", {"text_config": {"model_type": "gemma", **GROUPED, "head_dim": 8}, "vision_config": {"model_type": "siglip_vision_model", **PATCHES, "projection_dim": 32}, "projection_dim": 32, "image_token_index": 95}, lambda: {**with_image_tokens(95, 16), "token_type_ids": torch.ones(2, 28, dtype=torch.long)}),
    "git": Architecture("GitForCausalLM", {**S, "vision_config": PATCHES}, lambda: {**bare_text(), **image()()}),
    "layoutlm": Architecture("LayoutLMForMaskedLM", {**S, "max_2d_position_embeddings": 64}, lambda: {**text()(), "bbox": torch.randint(0, 16, (2, 12, 4)).sort(-1).values}),
    "lxmert": Architecture("LxmertModel", {**S, "l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 16}, lambda: {"input_ids": torch.randint(3, 90, (2, 12)), "visual_feats": torch.randn(2, 4, 16), "visual_pos": torch.rand(2, 4, 4)}),
    # time series and decisions
    "time_series_transformer": Architecture("TimeSeriesTransformerForPrediction", {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_time_features": 1}, lambda: {"past_values": torch.rand(2, 10), "past_time_features": torch.rand(2, 10, 1), "past_observed_mask": torch.ones(2, 10), "future_values": torch.rand(2, 4), "future_time_features": torch.rand(2, 4, 1)}),
    "patchtst": Architecture("PatchTSTForPrediction", {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "prediction_length": 4}, lambda: {"past_values": torch.randn(2, 16, 2), "future_values": torch.randn(2, 4, 2)}),
    "decision_transformer": Architecture("DecisionTransformerModel", {"state_dim": 5, "act_dim": 2, "hidden_size": 32, "n_layer": 2, "n_head": 4, "max_ep_len": 64, "n_positions": 64}, lambda: {"states": torch.randn(2, 6, 5), "actions": torch.randn(2, 6, 2), "rewards": torch.randn(2, 6, 1), "returns_to_go": torch.randn(2, 6, 1), "timesteps": torch.arange(6).expand(2, 6), "attention_mask": torch.ones(2, 6, dtype=torch.long)}),
}  # fmt: skip


def with_image_tokens(token: int, count: int) -> dict[str, Any]:
    """Text with ``count`` places for the image's patches at the front."""
    both = {**text()(), **image()()}
    places = torch.full((2, count), token)
    both["input_ids"] = torch.cat([places, both["input_ids"]], 1)
    both["attention_mask"] = torch.cat([torch.ones(2, count, dtype=torch.long), both["attention_mask"]], 1)
    both["labels"] = torch.cat([torch.full((2, count), -100), both["labels"]], 1)
    return both
