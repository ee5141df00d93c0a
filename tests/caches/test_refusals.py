"""Options, or an option and a model, that a cache refuses: one row for each refusal that a feature registers."""

import copy
import re

import pytest
import rooms
import transformers as hf

from qkvcache import CompressedCache, policies
from qkvcache.caches.refusals import Refusal, all_refusals
from tests.matrix import model

SHARE, HEADS = policies.KeyDiff(budget=0.5), policies.H2O(budget=policies.Budget(64, heads=(1.0, 2.0)))
SINKS = policies.SinkWindow(window_length=30, positions="cache")


def llama(**attributes) -> hf.PreTrainedConfig:
    """A config that says more than that of a Llama."""
    config = copy.deepcopy(model("llama").config)
    for name, value in attributes.items():
        setattr(config, name, value)
    return config


def of(name: str) -> hf.PreTrainedConfig:
    return model(name).config


def bloom() -> hf.PreTrainedConfig:
    return hf.BloomConfig(hidden_size=64, n_head=2, n_layer=2)


ROWS = [
    ("core", llama, {"max_length": 60, "offloading": True}, "offloading=True with max_length"),
    ("core", llama, {"compile": True, "offloading": True}, "offloading=True with compile=True"),
    ("core", lambda: llama(recurrent_kv_cache_mode="last_loop"), {}, "llama with recurrent_kv_cache_mode='last_loop'"),
    ("core", hf.CpmAntConfig, {"max_length": 60}, "max_length on cpmant"),
    ("core", lambda: hf.AutoConfig.for_model("cpmant"), {"compile": True}, "compile=True on cpmant"),
    ("evict", llama, {"policy": "h2o", "offloading": True}, "offloading=True with a policy"),
    ("evict", llama, {"policy": SHARE, "max_length": 60}, "budget=0.5 with max_length"),
    ("evict", llama, {"policy": SINKS, "compile": True}, "positions='cache' with compile=True"),
    ("evict", llama, {"policy": "adakv_snapkv", "max_length": 60}, "alpha_safeguard=0.2 with max_length"),
    ("evict", llama, {"policy": HEADS, "compile": True}, "budgets of heads with compile=True"),
    ("evict", None, {"policy": "kvzip"}, "policy=KVzip needs the config"),
    ("evict", None, {"policy": policies.H2O(budget=[32, 64])}, "budgets by layer need the config"),
    ("evict", None, {"policy": SINKS}, "positions='cache' needs the config"),
    ("evict", None, {"policy": "expected_attention"}, "policy=ExpectedAttention needs the config: it says how keys"),
    ("evict", bloom, {"policy": "h2o"}, "policy=H2O on bloom: ALiBi"),
    ("evict", lambda: of("t5"), {"policy": "h2o"}, "policy=H2O on t5: relative position bias"),
    ("evict", hf.FalconConfig, {"policy": "keydiff"}, "policy=KeyDiff on falcon: its attention does not go through"),
    ("evict", lambda: llama(num_key_value_heads=4), {"policy": HEADS}, "budgets for other heads than the 4 KV heads of llama"),
    ("evict", lambda: of("gemma3n"), {"policy": "h2o", "max_length": 60}, "a policy with max_length on gemma3n_text"),
    ("select", llama, {"policy": "h2o", "attention_budget": 64}, "attention_budget=64 with policy=H2O"),
    ("select", llama, {"offload_pages": True}, "offload_pages=True without attention_budget"),
    ("select", llama, {"offload_pages": True, "attention_budget": 64, "offloading": True}, "offload_pages=True with offloading=True"),
    ("latents", lambda: of("deepseek_v3"), {"attention_budget": 64}, "attention_budget=64 on deepseek_v3"),
    ("latents", lambda: llama(index_topk=4), {"policy": "h2o"}, "policy=H2O on llama: its indexer"),
    ("latents", lambda: of("deepseek_v3"), {"policy": "h2o"}, "policy=H2O on deepseek_v3: it expands latents"),
]
"""The room that refuses, the model's config, the options, and the beginning of the message."""


def pattern(refusal: Refusal) -> str:
    text = f"{refusal.what}: {refusal.why}; {refusal.instead}"
    return ".*".join(map(re.escape, re.split(r"\{[^}]*\}", text)))


def message(make, options: dict) -> str:
    with pytest.raises((NotImplementedError, ValueError)) as caught:
        CompressedCache(make and make(), **({} if "policy" in options else {"format": "int8"}) | options)
    return str(caught.value)


@pytest.mark.parametrize(("room", "make", "options", "says"), ROWS, ids=[row[-1] for row in ROWS])
def test_caches_refuse(room, make, options, says):
    if room in rooms.gone():
        pytest.skip(f"without {room}")
    found = message(make, options)
    assert found.startswith(says)
    assert any(re.fullmatch(pattern(refusal), found) for refusal in all_refusals())


def test_each_refusal_has_a_row():
    messages = [message(make, options) for room, make, options, _ in ROWS if room not in rooms.gone()]
    for refusal in all_refusals():
        assert any(re.fullmatch(pattern(refusal), found) for found in messages), refusal.what
