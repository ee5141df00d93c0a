"""Attention on the codes of latents (MLA): every family, against DynamicCache and against the same codes decoded."""

import copy

import pytest
import torch
import transformers as hf
from families_models import build
from torch import nn
from transformers import DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from qkvcache import CompressedCache, PrefixStore, attention
from qkvcache.latents import attention as latents
from qkvcache.latents.attention import transposed_weight
from tests import matrix
from tests.reference import MODES, ZONES, Mode, assert_close, count_decoded_layers, decoded, forward, prompt, run, steps
from tests.seeds import SEED
from tests.tolerance import of_model

DEEPSEEK = matrix.MODELS["deepseek_v3"]().to_dict()
OTHERS = {
    "glm4_moe_lite": {},
    "mistral4": {"qk_nope_head_dim": 16},
    "longcat_flash": {
        "head_dim": 16,
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 1,
        "moe_topk": 2,
    },
    "youtu": {},
    "deepseek_v2": {"topk_method": "greedy"},
    "minicpm3": {},
}
SMALL = {
    name: DEEPSEEK[name]
    for name in (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
        *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "moe_intermediate_size"),
        *("n_routed_experts", "num_experts_per_tok", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id"),
    )
    if name in DEEPSEEK
}
RELEASED = "sarvam_mla", "dots3_note_text"
"""Models whose code is another model's, or whose layers have different latents."""
pytestmark = pytest.mark.skipif(not hasattr(DeepseekV3Attention, "expand_kv"), reason="this transformers caches no latents")
FED = Mode((0, 5), (20, 1, 20, 1))


@pytest.fixture(scope="module")
def deepseek():
    return matrix.model("deepseek_v3")


def family(name):
    if name not in hf.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    if name in RELEASED:
        attention.uninstall()  # also the methods that caches of other models wrapped
        return build(name)
    config = hf.AutoConfig.for_model(name, **SMALL | {"num_hidden_layers": 2} | OTHERS[name])
    torch.manual_seed(SEED)
    kind = hf.Mistral4ForCausalLM._from_config if name == "mistral4" else hf.AutoModelForCausalLM.from_config
    return kind(config, attn_implementation="sdpa").eval()


def check(network, mode, format="turboquant_4bit_nc", **options):
    """Each step equals that over the same codes decoded, and decodes no layer."""
    cache = CompressedCache(network.config, format=format, **ZONES["zones"] | options)
    ids, mask = mode.inputs()
    begin = 0
    for size in mode.sizes:
        expected = forward(network, decoded(cache), ids, mask, begin, begin + size)
        with count_decoded_layers() as dense:
            got = forward(network, cache, ids, mask, begin, begin + size)
        assert not dense
        assert_close(got, expected, of_model(network))
        begin += size


@pytest.mark.parametrize("name", (*OTHERS, *RELEASED))
def test_every_family_attends_on_codes(name):
    network = family(name)
    exact = CompressedCache(network.config, format="identity", **ZONES["zones"])
    for ours, theirs in zip(steps(network, exact, FED), steps(network, DynamicCache(config=network.config), FED), strict=True):
        assert_close(ours, theirs, of_model(network))
    check(network, FED)


@pytest.mark.parametrize("format", ["identity", "int8", "fp8", "turboquant_4bit_nc", "int4", "nvfp4", "hadaquant_k3v3"])
def test_blocks_and_absorbed_attention_equal_decoded_codes(deepseek, format, monkeypatch):
    monkeypatch.setattr(latents, "ABSORBED_QUERIES", 4)
    monkeypatch.setattr(latents, "most_tokens", lambda query, heads: 64)
    check(deepseek, Mode((0, 5, 70), (150, 1, 18, 3)), format)


@pytest.mark.parametrize(("attention", "length"), [*((name, None) for name in matrix.ATTENTION), ("sdpa", 80)])
def test_no_step_decodes_a_layer(attention, length):
    check(matrix.model("deepseek_v3", attention), MODES["chunked_padded"], "int8", max_length=length)


@pytest.mark.parametrize("format", ["identity", "int8"])
def test_beams_equal_those_of_dynamic_cache(deepseek, format):
    found, expected = (
        run(deepseek, cache, max_new_tokens=8, num_beams=3)
        for cache in (CompressedCache(deepseek.config, format=format, residual_length=8), DynamicCache(config=deepseek.config))
    )
    assert torch.equal(found, expected) or format != "identity"


def test_a_prefix_is_continued_as_the_cache_that_was_stored(deepseek):
    ids = prompt(length=60)["input_ids"]
    longer = torch.cat([ids, ids[:, :9]], dim=1)
    store = PrefixStore(deepseek, max_bytes=2**24)
    first = CompressedCache(deepseek.config, format="turboquant_4bit_nc", **ZONES["zones"])
    run(deepseek, first, {"input_ids": ids}, max_new_tokens=2)
    assert store.store(ids, first)
    found = store.fetch(longer)
    assert found.length == 60
    first.crop(found.length - first.get_seq_length())
    with count_decoded_layers() as dense:
        got, expected = (run(deepseek, cache, {"input_ids": longer}, max_new_tokens=5) for cache in (found.cache, first))
    assert torch.equal(got, expected)
    assert not dense


def test_the_rotated_part_has_eight_bits_or_more(deepseek):
    sizes = {}
    for format in ("identity", "int8", "turboquant_4bit_nc"):
        cache = CompressedCache(deepseek.config, format=format, **ZONES["bare"])
        run(deepseek, cache, max_new_tokens=2)
        rope = cache.layers[0].storage.tokens.codecs[1]
        sizes[format] = sum(x.nbytes(torch.float32) for x in rope.buffers(16) if x.role == "codes")
    assert sizes == {"identity": 64, "int8": 16, "turboquant_4bit_nc": 16}


def test_weights_of_layers_other_than_linear(deepseek):
    class Half(nn.Module):
        """A projection whose weight is not that of a plain `Linear`, as quantized or adapted ones."""

        def __init__(self, linear):
            super().__init__()
            self.stored = nn.Parameter(linear.weight.detach().clone())

        def forward(self, x):
            return x @ self.stored.mT

    network = copy.deepcopy(deepseek)
    for layer in network.model.layers:
        layer.self_attn.kv_b_proj = Half(layer.self_attn.kv_b_proj)
        assert_close(transposed_weight(layer.self_attn.kv_b_proj, 32), layer.self_attn.kv_b_proj.stored.mT, 1e-6)
    check(network, MODES["single"])


def test_a_class_without_the_method_is_dequantized(deepseek, monkeypatch):
    attention.uninstall()
    attention.install()
    assert not latents._stock
    monkeypatch.setattr("qkvcache.latents.attention.code_of", lambda config: None)
    cache = CompressedCache(deepseek.config, format="identity", **ZONES["zones"])
    expected = list(steps(deepseek, DynamicCache(config=deepseek.config), MODES["padded"]))
    with pytest.warns(UserWarning, match="dequantizes the whole layer"), count_decoded_layers() as dense:
        got = list(steps(deepseek, cache, MODES["padded"]))
    assert dense
    assert_close(torch.cat(got), torch.cat(expected), of_model(deepseek))
