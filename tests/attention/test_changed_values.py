"""Models that change keys or values after the cache returned them, and attention functions of users."""

import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, DiffLlamaConfig, GPTNeoXJapaneseConfig
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward

from qkvcache import CompressedCache, H2OCache
from qkvcache.attention import compressed_kv
from qkvcache.releases import CACHE_ARGUMENT
from tests.matrix import _NO_HEAD_DIM, ATTENTION, model
from tests.reference import MODES, ZONES, assert_close, count_decoded_layers, steps
from tests.seeds import SEED
from tests.tolerance import of_model

MODE = MODES["padded"]
SLOW = "attention code calls .* on compressed keys or values"
CHANGES = {
    "values scaled": lambda key, value: (key, 1.5 * value),
    "keys scaled": lambda key, value: (key * 0.5, value),
    "both scaled": lambda key, value: (key / 2, value + value),
    "keys of fewer heads": lambda key, value: (torch.stack([key[:, 0]] * 2, dim=1), value),
    "values split": lambda key, value: (key, torch.cat(torch.chunk(value, 2, dim=1)[::-1], dim=1)),
    "values repeated": lambda key, value: (key, torch.chunk(value, 2, dim=1)[0].repeat(1, 2, 1, 1)),
    "half of the channels": lambda key, value: (key, value * (torch.arange(value.shape[3]) % 2)),
    "swapped": lambda key, value: (value, key),
    "twice the keys": lambda key, value: (key, key),
    "heads repeated": lambda key, value: (repeat_kv(key, 2), repeat_kv(value, 2)),
    "as returned": lambda key, value: (key, value),
}
"""What the attention of a model does to the keys and values `[B, H, T, D]` that `update` returns."""
LAZY = ("heads repeated", "as returned")
FLEX = ("values scaled", "keys scaled")
"""Those with flex attention, which takes a second each on a CPU."""
INT8 = 0.06
"""Of the largest logit, what int8 may move it by; ignored changes move it by more than 0.2."""
UNOBSERVED = "both scaled"
"""Attention gets plain tensors only, so that the layer hears of no attention until its next step."""


class ChangingAttention(LlamaAttention):
    """Attention on what `change` makes of the keys and values."""

    change = staticmethod(CHANGES["as returned"])

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = self.q_proj, self.k_proj, self.v_proj
        query, key, value = (projection(hidden_states).view(shape).transpose(1, 2) for projection in projections)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if (cache := kwargs.pop(CACHE_ARGUMENT)) is not None:
            key, value = cache.update(key, value, self.layer_idx)
        key, value = self.change(key, value)
        self.num_key_value_groups = query.shape[1] // key.shape[1]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*shape[:-2], -1)), weights


@pytest.fixture
def changing(request):
    """The Llama of the matrix with `ChangingAttention`, and its attention modules."""
    network = model("llama", request.param)
    modules = [layer.self_attn for layer in network.model.layers]
    for module in modules:
        module.__class__ = ChangingAttention
    yield network, modules
    for module in modules:
        module.__class__ = LlamaAttention
        module.num_key_value_groups = 2
        module.__dict__.pop("change", None)


def without_a_cache(network) -> list[torch.Tensor]:
    """As `steps`, from one forward over all tokens."""
    ids, mask = MODE.inputs()
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        logits = network(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    parts = zip(logits.split(MODE.sizes, dim=1), mask.split(MODE.sizes, dim=1), strict=True)
    return [part[shown.bool()] for part, shown in parts]


def check(network, cache, tolerance: float) -> None:
    for got, expected in zip(steps(network, cache, MODE), without_a_cache(network), strict=True):
        assert_close(got, expected, tolerance)


def check_formats(network) -> None:
    for format, tolerance in (("identity", of_model(network)), ("int8", INT8)):
        check(network, CompressedCache(network.config, format=format, **ZONES["zones"]), tolerance)


@pytest.mark.filterwarnings(f"ignore:{SLOW}")
@pytest.mark.parametrize(
    ("changing", "change"),
    [(attention, change) for attention in ATTENTION for change in CHANGES if attention != "flex_attention" or change in FLEX],
    indirect=["changing"],
)
def test_logits_are_those_without_a_cache(changing, change):
    network, modules = changing
    for module in modules:
        module.change = CHANGES[change]
    for length in (None, 40):
        options = ZONES["zones"] | {"max_length": length}
        check(network, CompressedCache(network.config, format="identity", **options), of_model(network))
    with count_decoded_layers() as decoded:
        check(network, CompressedCache(network.config, format="int8", **ZONES["zones"]), INT8)
    assert not decoded or change not in LAZY


@pytest.mark.filterwarnings(f"ignore:{SLOW}")
@pytest.mark.parametrize("changing", ["sdpa", "eager"], indirect=True)
def test_values_of_another_layer(changing):
    network, modules = changing
    values = {}
    modules[0].change = lambda key, value: (key, values.update(first=value) or value)
    for module in modules[1:]:
        module.change = lambda key, value: (key, values["first"])
    check_formats(network)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("changing", ["sdpa", "eager"], indirect=True)
def test_a_cache_that_evicts_refuses_changed_values(changing, change):
    network, modules = changing
    for module in modules:
        module.change = CHANGES[change]
    run = steps(network, H2OCache(network.config, budget=64), MODE)
    if change in LAZY:
        for got, expected in zip(run, without_a_cache(network), strict=True):
            assert_close(got, expected, of_model(network))
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=SLOW)
        if change == UNOBSERVED:
            assert_close(next(run), without_a_cache(network)[0], of_model(network))
        says = "was not seen" if change == UNOBSERVED else "changes its keys or values"
        with pytest.raises(NotImplementedError, match=says):
            next(run)


@pytest.mark.filterwarnings(f"ignore:{SLOW}")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_differential_attention(attention):
    """Two calls a layer, each on half of the value heads."""
    torch.manual_seed(SEED)
    network = AutoModelForCausalLM.from_config(DiffLlamaConfig(**_NO_HEAD_DIM), attn_implementation=attention).eval()
    check_formats(network)
    with pytest.raises(NotImplementedError, match=r"changes its keys or values.*leave out the policy"):
        next(steps(network, H2OCache(network.config, budget=16), MODE))


@pytest.mark.parametrize("changing", ["sdpa"], indirect=True)
def test_dequantizing_changed_values_is_told(changing):
    network, modules = changing
    modules[0].change = CHANGES["values scaled"]
    compressed_kv.warn_once.cache_clear()
    with pytest.warns(UserWarning, match=SLOW):
        list(steps(network, CompressedCache(network.config, format="int8", **ZONES["zones"]), MODE))


def test_a_function_of_the_user_is_called(monkeypatch):
    """In every step, on codes where it does what these can."""

    def half(*args, **kwargs):
        out, weights = sdpa_attention_forward(*args, **kwargs)
        return out / 2, weights

    AttentionInterface.register("half", half)
    ALL_MASK_ATTENTION_FUNCTIONS.register("half", sdpa_mask)
    try:
        network = model("llama", "half")
        check(network, CompressedCache(network.config, format="identity", **ZONES["zones"]), of_model(network))
        check(network, H2OCache(network.config, budget=64), of_model(network))
        with count_decoded_layers() as decoded:
            check(network, CompressedCache(network.config, format="int8", **ZONES["zones"]), INT8)
        assert not decoded
    finally:
        for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            registry._global_mapping.pop("half")


@pytest.mark.parametrize("write", [lambda x: x.mul_(2), lambda x: torch.relu_(x)])
def test_writing_in_place_is_refused(write):
    cache = CompressedCache(format="int8")
    for tokens in (9, 1):
        key, _ = cache.update(torch.randn(1, 2, tokens, 32), torch.randn(1, 2, tokens, 32), 0)
    with pytest.raises(NotImplementedError, match="cannot be written in place"):
        write(key)


@pytest.mark.filterwarnings(f"ignore:{SLOW}")
def test_attention_that_calls_methods_of_tensors():
    """GPT-NeoX Japanese takes views of its keys and values."""
    size = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    torch.manual_seed(SEED)
    network = AutoModelForCausalLM.from_config(GPTNeoXJapaneseConfig(**size, intermediate_multiple_size=2)).eval()
    check_formats(network)
