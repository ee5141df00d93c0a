"""Tiny random models of transformers' families: sizes by the names of a config's attributes, and a table of quirks."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache
from transformers.models.auto import modeling_auto as auto

from qkvcache import CompressedCache
from qkvcache.releases import passing

CAUSAL = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
OTHERS = {
    "apertus1p5": "Apertus1p5ForConditionalGeneration",
    "aria": "AriaForConditionalGeneration",
    "glm4v": "Glm4vForConditionalGeneration",
    "glm5_next": "Glm5NextForConditionalGeneration",
    "hy_v4_vl": "HYV4VLForConditionalGeneration",
    "inkling2_loop": "Inkling2LoopForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "kimi_k25": "Kimi_K25ForConditionalGeneration",
    "lfm2_vl": "Lfm2VlForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "mistral4": "Mistral4ForCausalLM",
    "omniasr": "OmniASRForConditionalGeneration",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5 (vision)": "Qwen3_5ForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "step3p7": "Step3p7ForConditionalGeneration",
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "voxtral": "VoxtralForConditionalGeneration",
    "bart (encoder-decoder)": "BartForConditionalGeneration",
    "m2m_100": "M2M100ForConditionalGeneration",
    "marian (encoder-decoder)": "MarianMTModel",
    "mbart (encoder-decoder)": "MBartForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "pegasus (encoder-decoder)": "PegasusForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "t5gemma": "T5GemmaForConditionalGeneration",
    "moonshine": "MoonshineForConditionalGeneration",
    "whisper (speech)": "WhisperForConditionalGeneration",
}
VOCABULARY = 256
PROMPT, PADDING, STEPS, LONG = 28, 9, 5, 160
EXACT = {"num_sink_tokens": 0, "residual_length": 0}
SIZES: dict[str, Any] = {
    name: size
    for size, names in (
        (1, "n_group topk_group attn_layer_offset mamba_n_groups num_dense_layers num_nextn_predict_layers"),
        (2, "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers depth num_encoder_layers"),
        (2, "num_decoder_layers num_blocks num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token"),
        (2, "moe_topk moe_k attn_layer_period mamba_expand n_mamba_heads"),
        (4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
        (4, "num_encoder_attention_heads num_decoder_attention_heads num_experts num_local_experts n_routed_experts"),
        (4, "moe_num_experts linear_num_value_heads linear_num_heads linear_num_key_heads"),
        (8, "mamba_n_heads mamba_num_heads mamba_headdim mamba_d_head mamba_head_dim"),
        (14, "patch_size"),
        (16, "head_dim d_kv d_head dim_head qk_rope_head_dim qk_nope_head_dim v_head_dim rotary_dim"),
        (16, "linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim index_n_heads index_topk"),
        (16, "mamba_d_state ssm_state_size state_size mamba_chunk_size chunk_size mamba_dt_rank"),
        (16, "sliding_window attention_chunk_size attention_window_size local_attention"),
        (28, "image_size"),
        (32, "global_head_dim qk_head_dim kv_lora_rank q_lora_rank o_lora_rank hidden_size_per_layer_input"),
        (64, "hidden_size d_model n_embd emb_dim word_embed_proj_dim lru_width embedding_dim intermediate_size"),
        (64, "ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_inner n_inner dim_ff dff ffn_hidden_size"),
        (64, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size"),
        (128, "mamba_d_ssm"),
        (512, "max_position_embeddings n_positions n_ctx max_target_positions max_seq_len"),
        (VOCABULARY, "vocab_size vocab_size_per_layer_input decoder_vocab_size"),
    )
    for name in names.split()
}
SIZES |= {"is_decoder": True} | dict.fromkeys(("initializer_range", "init_std", "initializer_factor"), 0.2)  # attention far from uniform
IDS = {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1}
MIXED = ["sliding_attention", "full_attention"]
CHUNKED = ["chunked_attention", "full_attention"]
INKLING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "sliding_window_size": 16}
INKLING |= {"unpadded_vocab_size": VOCABULARY}
DOTS_SLIDING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 32, "swa_kv_lora_rank": 64}
DOTS_SLIDING |= {"swa_head_dim": 32, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16}
LOOP = {"loop_layer_index_start": 2, "loop_layer_index_end": 4, "n_layers_per_attn_res_block": 2}
QSA = tuple(f"indexer_{name}" for name in ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio"))
SPARSE = ["full_attention", "minimax_m3_sparse"]
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
QUIRKS: dict[str, dict[str, Any]] = {
    "apertus1p5": {"image_token_id": 90, "audio_token_id": 91, "image_token_offset": 100, "audio_token_offset": 132},
    "apertus1p5_vision_tokenizer": {"codebook_size": 32, "base_channels": 32},
    "wavtokenizer_encoder": {"codebook_size": 32, "codebook_dim": 64},
    "bailing_hybrid": {"num_expert_group": 1},
    "bamba": {"attn_layer_indices": [1], "mamba_d_head": 16},
    "cohere_compass_text": {"rope_parameters": {"full_attention": MROPE["rope_parameters"]}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "layer_types": MIXED},
    "dory": {"n_input_layers": 2, "n_output_layers": 2, "layer_types": MIXED * 3},
    "dots3_note_text": {"head_dim": 32} | DOTS_SLIDING,
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    "dots3_note_audio_encoder": {"adapter_out_dim": 64},
    "falcon_h1": {"mamba_d_head": 16},
    "glm4v_text": MROPE,
    "glm5_next_text": {"qk_rope_head_dim": 0, "index_kpool": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "hy_v4_vl_text": {"rope_parameters": MROPE["rope_parameters"]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_d_head": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hrm_text": {"H_cycles": 1, "L_cycles": 1, "L_bp_cycles": [1]},
    "inkling2_loop_text": INKLING | LOOP | {"layer_types": ["hybrid_sliding", "hybrid"] * 3},
    "inkling2_text": INKLING,
    "inkling2_vision": {"text_hidden_size": 64},
    "inkling_text": INKLING,
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"layer_types": CHUNKED, "no_rope_layers": [1, 0], "moe_layers": [1]},
    "longcat_flash": {"zero_expert_num": 4},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "minimax_m3_vl_text": {"layer_types": SPARSE, "index_n_heads": 2, "index_block_size": 64},
    "ministral": {"head_dim": 16},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "mistral": {"sliding_window": None},
    "mistral4": {"head_dim": 32},
    "nemotron": {"num_key_value_heads": 2},
    "qwen2_5_vl_text": MROPE,
    "qwen4_exp_text": dict(zip(QSA, (4, 1, 16, 16, 4), strict=True)),
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 16]},
    "roc_bert": {"shape_vocab_size": 64, "pronunciation_vocab_size": 64},
    "step3p5": {"layer_types": MIXED, "sliding_window": 16},
    "voxtral": {"audio_token_id": VOCABULARY - 1},
    "whisper (speech)": {"max_source_positions": 30, "num_mel_bins": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba2": {"n_mamba_heads": 8, "mamba_headdim": 16},
    "zaya": {"num_experts_per_tok": 1},
}


def shrunk(default: PreTrainedConfig, quirks: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a small config: one layer of each kind, two at least; where layers share keys, each kind twice."""
    given = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    count = given.get("num_hidden_layers")
    lists = {name: x for name, x in given.items() if isinstance(x, list | tuple) and name not in quirks}
    by_layer = {name: x for name, x in lists.items() if len(x) == count}
    kinds = {str(kind): index for index, kind in reversed(list(enumerate(zip(*by_layer.values(), strict=True))))}
    picked = sorted(kinds.values())
    picked = (picked * 2)[: max(2, len(picked))]
    if shared := given.get("num_kv_shared_layers"):  # as many layers more
        picked *= 2
    small = {name: value for name, value in (SIZES | IDS).items() if given.get(name) is not None}
    if shared:
        small["num_kv_shared_layers"] = len(picked) // 2
    for name, values in by_layer.items():
        small[name] = [small.get(name, values[index]) for index in picked]
    for name in default.sub_configs:
        if isinstance(sub := given.get(name), PreTrainedConfig):
            small[name] = {"model_type": sub.model_type} | shrunk(sub, QUIRKS.get(sub.model_type, {}))
    small |= quirks
    if types := small.get("layer_types"):
        small["num_hidden_layers"] = len(types)
    if given.get("kv_lora_rank"):
        small["num_key_value_heads"] = SIZES["num_attention_heads"]
    return small


def by_hand(family: str) -> list[str]:
    """The attributes of a family's config that are set here and differ from the released ones in more than size."""
    default = CONFIG_MAPPING[family.split()[0]]()
    parts = [getattr(default, name, None) for name in default.sub_configs]
    names = {family: QUIRKS.get(family, {})} | {part.model_type: QUIRKS.get(part.model_type, {}) for part in parts if part is not None}
    return sorted({name for quirks in names.values() for name in quirks})


def build(family: str, attention: str | None = None) -> PreTrainedModel:
    """The tiny model of a family, in inference mode, always with the same weights. `attention`: its `attn_implementation`; None: the one
    that transformers chooses."""
    kind = CONFIG_MAPPING[family.split()[0]]
    config = kind(**shrunk(kind(), QUIRKS.get(family, {})))
    model = getattr(transformers, (CAUSAL | OTHERS)[family])
    config = config if isinstance(config, model.config_class) else config.get_text_config()
    config._attn_implementation = attention
    torch.manual_seed(0)
    return model(config).eval()


class Forced(LogitsProcessor):
    """Chooses given tokens, one a call, and keeps the logits."""

    def __init__(self, tokens: Tensor):
        self.tokens, self.logits = iter(tokens.tolist()), []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.logits.append(scores)
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, next(self.tokens)] = 0
        return chosen


class Family:
    """One tiny model, the prompts that it reads, and what DynamicCache makes of them."""

    def __init__(self, name: str, attention: str | None = None):
        self.model = build(name, attention)
        self.encodes = self.model.config.is_encoder_decoder
        self.config = self.model.config.get_text_config(decoder=True)
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(3, VOCABULARY - 16, (2, 3 * PROMPT), generator=draw)
        tokens[:, PROMPT // 2 : PROMPT] = tokens[:, : PROMPT // 2]  # that prompt lookup finds something
        tokens[0, 0] = tokens[1, PADDING] = 1
        self.long = torch.randint(3, VOCABULARY - 16, (1, LONG), generator=draw)
        self.long[:, 0] = 1
        self.ids, self.more = tokens[:, :PROMPT].clone(), tokens[:, PROMPT:]
        self.ids[1, :PADDING] = 0
        self.alone = self.ids[1:, PADDING:].clone()
        self.ids[1] = self.ids[1].roll(-PADDING if self.encodes else 0)  # encoders are padded on the right
        self.forced = self.more[0, :STEPS]
        self.wave = torch.randn(2, 4000, generator=draw)

    def inputs(self, ids: Tensor) -> dict[str, Tensor]:
        """The keywords of `generate`: token 0 is padding."""
        if not self.encodes:
            return {"input_ids": ids, "attention_mask": (ids != 0).long()}
        start = self.long[:, : 12 if ids.shape[1] < LONG else LONG].expand(len(ids), -1)
        name = self.model.main_input_name
        if name == "input_ids":
            return {name: ids, "attention_mask": (ids != 0).long(), "decoder_input_ids": start}
        wave = self.wave[-len(ids) :]
        sound = wave[:, : 60 * 16].view(-1, 16, 60) if name == "input_features" else wave
        return {name: sound, "decoder_input_ids": start}

    def cache(self, **options) -> Cache:
        """A compressed cache without exact zones."""
        return self.wrapped(CompressedCache(self.model.config, **{"format": "identity"} | EXACT | options))

    def dynamic(self, **_) -> Cache:
        return self.wrapped(DynamicCache(config=self.config))

    def wrapped(self, cache: Cache) -> Cache:
        return EncoderDecoderCache(cache, DynamicCache()) if self.encodes else cache

    def generate(self, ids: Tensor, cache: Cache, forced: Tensor | None = None, **options) -> Tensor:
        """The logits of each step `[B, T, V]` with forced tokens, else the tokens that were generated `[B, T]`."""
        special = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": None}
        config = GenerationConfig(max_new_tokens=STEPS, do_sample=False, disable_compile=True, **special, **options)
        given = self.inputs(ids) | passing(cache) | {"generation_config": config}
        if forced is None:
            return self.model.generate(**given)[:, -STEPS:]
        self.model.generate(**given, logits_processor=[chosen := Forced(forced)])
        return torch.stack(chosen.logits, 1)

    @functools.cached_property
    def base(self) -> Tensor:
        logits = self.generate(self.ids, past := self.dynamic(), self.forced)
        if not past.get_seq_length():
            raise ValueError("the model leaves its DynamicCache empty")
        return logits

    @functools.cached_property
    def base_alone(self) -> Tensor:
        return self.generate(self.alone, self.dynamic(), self.forced)

    @functools.cached_property
    def greedy(self) -> Tensor:
        return self.generate(self.alone, self.dynamic())
