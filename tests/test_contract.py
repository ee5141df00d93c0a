"""What transformers promises us, on the oldest and on the newest supported release: signatures, and what the main job relies on. The main
job itself is in `caches/test_matrix.py` and `caches/test_generate.py`, whose cases of two architectures have the mark too."""

import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch.nn.attention.flex_attention import BlockMask
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from qkvcache import CompressedCache, TurboQuantCache
from qkvcache.attention.masks import HARMLESS, USED
from qkvcache.attention.model_code import OWN_ATTENTION
from qkvcache.layers.compressed import CompressedLayer
from qkvcache.releases import passing
from tests.matrix import MODELS, model
from tests.reference import MODES, ZONES, assert_close, assert_steps_alike, steps
from tests.seeds import SEED
from tests.tolerance import of_model

pytestmark = pytest.mark.contract

ZONE = ZONES["zones"]
NAMES = ["llama", "gemma3"]


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


# Signatures.


def test_keywords_of_attention_functions_are_known():
    """Each keyword that a model passes is used, changes nothing, or is refused by name."""
    found: set[str] = set()
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        for call in re.findall(r"= attention_interface\(\n(.*?)\n +\)\n", file.read_text(), re.DOTALL):
            found |= set(re.findall(r"^ +(\w+)=", call, re.MULTILINE))
    tensors = {"query", "key", "value", "attention_mask"}
    refused = {"block_indices", "sinks"}  # of MiniMax-M3, and of Inkling 2, whose eager attention alone has them
    assert {"scaling", "position_bias", "s_aux"} <= found <= USED | HARMLESS | tensors | refused | {"indices"}


def test_get_interface():
    assert parameters(AttentionInterface.get_interface) == ["self", "attn_implementation", "default"]


def test_models_whose_attention_no_policy_sees():
    """Those that update a cache, and nowhere ask for an attention function, are among those that eviction is refused for."""
    found, unseen, alibi, states = set(), set(), {"bloom", "mpt"}, {"nemotron3_5_asr", "vibevoice_acoustic_tokenizer", "vibevoice_asr"}
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        code = file.read_text()
        if re.search(r"(past|cache)\w*\.update\(", code) and "ALL_ATTENTION_FUNCTIONS" not in code:
            types = re.findall(r'model_type = "([^"]+)"', "".join(x.read_text() for x in file.parent.glob("configuration_*.py")))
            assert types, file.name
            found |= {file.parent.name}
            if not OWN_ATTENTION & set(types):
                unseen.add(file.parent.name)
    assert unseen <= alibi | states and {"falcon", "xlm"} <= found


def test_masks_of_flex_attention_can_be_cut():
    assert parameters(BlockMask._adjust) == ["self", "new_q_len", "new_kv_len"]


def test_layers():
    assert parameters(CacheLayerMixin.get_mask_sizes) == ["self", "query_length"]
    assert parameters(CacheLayerMixin.update) == ["self", "key_states", "value_states", "args", "kwargs"]
    assert not CompressedLayer.__abstractmethods__
    public = {name for name in vars(DynamicLayer) if not name.startswith("_")}
    assert public <= set(dir(CompressedLayer))


def test_prepare_cache_for_generation():
    assert {"generation_config", "model_kwargs"} <= set(parameters(GenerationMixin._prepare_cache_for_generation))
    assert callable(GenerationMixin._supports_default_dynamic_cache)


def test_caches():
    assert parameters(Cache.update)[:4] == ["self", "key_states", "value_states", "layer_idx"]
    assert parameters(Cache.crop) == ["self", "tokens_to_remove"]
    assert {"layers", "layer_class_to_replicate", "offloading"} <= set(parameters(Cache.__init__))


def test_configs_describe_each_layer():
    assert [layer.head_dim for layer in MODELS["gemma4"]().per_layer_config] == [32, 64] * 3
    assert MODELS["llama"]().per_layer_config[2].num_key_value_heads == 2


def test_layer_kinds():
    kinds = [type(layer) for layer in DynamicCache(config=model("gemma3").config).layers]
    assert kinds == [DynamicSlidingWindowLayer, DynamicLayer] * 2
    assert [type(layer) for layer in TurboQuantCache(model("gemma3").config).layers] == [DynamicSlidingWindowLayer, CompressedLayer] * 2


def test_what_generate_looks_at():
    cache = TurboQuantCache(model("llama").config)
    assert isinstance(cache, DynamicCache) and len(cache) == 3
    assert (cache.is_compileable, cache.is_croppable, cache.is_sliding) == (False, True, [False] * 3)
    assert not hasattr(cache, "to")  # accelerate would call it
    cache._is_user_defined = True


def test_the_registered_implementation_has_a_mask():
    TurboQuantCache(model("llama").config)
    assert "qkvcache" in ALL_ATTENTION_FUNCTIONS.valid_keys()
    assert "qkvcache" in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()


def test_crop_counts_from_the_end():
    config = model("llama").config
    for cache in (DynamicCache(config=config), TurboQuantCache(config, num_sink_tokens=0, residual_length=0)):
        x = torch.randn(1, 2, 10, 32)
        for layer in range(3):
            cache.update(x, x, layer)
        cache.crop(0)
        assert cache.get_seq_length() == 10
        cache.crop(-3)
        assert cache.get_seq_length() == 7
        cache.crop(torch.tensor(-2))  # assisted decoding
        assert cache.get_seq_length() == 5 and isinstance(cache.get_seq_length(), int)


# The main job.


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_softcap_and_sinks_with_the_default_implementation(name):
    """Which differs between releases: where a prefill drops softcap, so does a decode."""
    torch.manual_seed(SEED)
    network = transformers.AutoModelForCausalLM.from_config(MODELS[name]()).eval()
    ours, theirs = CompressedCache(network.config, format="identity", **ZONE), DynamicCache(config=network.config)
    assert_steps_alike(network, ours, theirs, MODES["chunked_padded"], of_model(network))


@pytest.mark.parametrize("name", NAMES)
def test_mask_sizes_are_the_shapes_that_update_returns(name, monkeypatch):
    network = model(name)
    cache = CompressedCache(network.config, format="int8", **ZONE)
    promised, stock = [], CompressedLayer.update

    def update(layer, key, value, *args, **kwargs):
        length, offset = layer.get_mask_sizes(key.shape[2])
        key, value = stock(layer, key, value, *args, **kwargs)
        promised.append((length, offset) == (key.shape[2], 0) and key.shape[2] == value.shape[2])
        return key, value

    monkeypatch.setattr(CompressedLayer, "update", update)
    for _ in steps(network, cache, MODES["chunked_padded"]):
        pass
    compressed = sum(type(layer) is CompressedLayer for layer in cache.layers)
    assert promised == [True] * compressed * len(MODES["chunked_padded"].sizes)


@pytest.mark.parametrize("name", NAMES)
def test_positions_come_from_the_cache(name):
    """Forwards without mask and positions."""
    network = model(name)
    ids = torch.randint(3, 100, (2, 40))
    caches = CompressedCache(network.config, format="identity", **ZONE), DynamicCache(config=network.config)
    for begin, end in ((0, 20), (20, 37), (37, 38), (38, 40)):
        with torch.no_grad():
            ours, theirs = (network(ids[:, begin:end], **passing(cache)).logits for cache in caches)
        assert_close(ours, theirs, of_model(network))


def generate(network, cache, inputs, **options):
    torch.manual_seed(SEED)
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None} | options
    return network.generate(**inputs, **passing(cache), **options)


@pytest.mark.parametrize("name", NAMES)
def test_new_ids_with_the_whole_mask(name):
    """A second turn that passes only what is new."""
    network = model(name)
    first, second = torch.randint(3, 100, (2, 24)), torch.randint(3, 100, (2, 6))
    mask = torch.ones(2, 24 + 8 + 6 - 1, dtype=torch.long)
    mask[1, :5] = 0
    results = []
    for cache in (DynamicCache(config=network.config), CompressedCache(network.config, format="identity", **ZONE)):
        generate(network, cache, {"input_ids": first, "attention_mask": mask[:, :24]}, max_new_tokens=8)
        assert cache.get_seq_length() == 31
        results.append(generate(network, cache, {"input_ids": second, "attention_mask": mask}, max_new_tokens=8))
    assert torch.equal(*results)
