"""The route: in place once a cache is made, gone without a trace when uninstalled, and nothing to everyone else."""

import copy
import statistics
import time
from types import SimpleNamespace

import pytest
import torch
from families_models import Family, build
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface, PreTrainedModel

from qkvcache import CompressedCache, H2OCache
from qkvcache.attention import CompressedKV, install, installed, uninstall
from qkvcache.attention.route import MAX_QUERIES, NAME, route
from qkvcache.kernels import attend
from qkvcache.kernels.attend.chunked import attend_chunked
from qkvcache.layers.compressed import CompressedLayer
from tests.matrix import FORMATS, model
from tests.processes import Program
from tests.reference import MODES, ZONES, assert_close, count_decoded_layers, forward, steps
from tests.softmax import softmax_attention
from tests.tolerance import of_model, rounding

REGISTRIES = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
MODULE = SimpleNamespace(is_causal=True)
MANY = MAX_QUERIES + 1
"""Queries for which a CPU does not attend on the codes."""


@pytest.fixture
def bare():
    """transformers without the route."""
    was = installed()
    uninstall()
    yield
    (install if was else uninstall)()


def transformers_state() -> tuple:
    methods = AttentionInterface.__dict__["get_interface"], PreTrainedModel.__dict__["get_correct_attn_implementation"]
    return *methods, *(dict(registry._global_mapping) for registry in REGISTRIES)


def handles(queries: int = 1) -> tuple[CompressedKV, CompressedKV]:
    layer = CompressedLayer(FORMATS["turboquant_4bit_nc"], 2, 4)
    for tokens in (30, queries):
        out = layer.update(torch.randn(2, 2, tokens, 32), torch.randn(2, 2, tokens, 32))
    return out


def recorder():
    calls = []

    def stock(*args, **kwargs):
        calls.append((args, kwargs))
        return "out", "weights"

    return stock, calls


# Installing


def test_install_and_uninstall_leave_no_trace(bare):
    before = transformers_state()
    for _ in range(2):
        install()
        once = AttentionInterface.get_interface
        CompressedCache(format="int8")
        install()
        assert AttentionInterface.get_interface is once
        assert installed() and transformers_state() != before
        assert all(NAME in registry for registry in REGISTRIES)
        uninstall()
        uninstall()
        assert not installed()
        assert all(a is b if callable(a) else a == b for a, b in zip(transformers_state(), before, strict=True))


def test_the_wrapper_keeps_what_get_interface_says(bare):
    default = torch.nn.Identity()
    install()
    interface = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", default)
    assert interface.func is route and interface.args == (ALL_ATTENTION_FUNCTIONS["sdpa"], "sdpa")
    assert ALL_ATTENTION_FUNCTIONS.get_interface("eager", default).args == (default, "eager")
    with pytest.raises(KeyError, match="no_such_name"):
        ALL_ATTENTION_FUNCTIONS.get_interface("no_such_name", default)


def test_import_changes_nothing_until_a_cache_is_made(tmp_path):
    (tmp_path / "program.py").write_text("""
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions, AttentionInterface
state = lambda: (AttentionInterface.get_interface, dict(functions), dict(masks))
before = state()
import qkvcache
from qkvcache import *
assert state() == before and not qkvcache.attention.installed()
qkvcache.CompressedCache(format="int8")
assert state() != before and qkvcache.attention.installed()
""")
    Program(tmp_path / "program.py").result()


# Through a model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_without_our_cache_is_as_before(bare, attention):
    network, mode = model("llama", attention), MODES["chunked_padded"]
    uninstall()
    before = list(steps(network, DynamicCache(), mode))
    install()
    assert all(map(torch.equal, before, steps(network, DynamicCache(), mode)))


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
@pytest.mark.filterwarnings("ignore:attention code calls", "ignore:flex_attention called", "ignore:_compile flag")
def test_live_caches_go_on_without_the_route(bare, attention):
    """The handles are the net: lazily under sdpa and eager."""
    network, mode = model("llama", attention), MODES["chunked_padded"]
    cache = CompressedCache(network.config, format="turboquant_4bit_nc", **ZONES["zones"])
    ids, mask = mode.inputs()
    begin = 0
    for size in mode.sizes:
        span = begin, begin + size
        twin = copy.deepcopy(cache)
        uninstall()
        with count_decoded_layers() as decoded:
            got = forward(network, twin, ids, mask, *span)
        assert not decoded or attention == "flex_attention"
        install()
        assert_close(got, forward(network, cache, ids, mask, *span), of_model(network))
        begin += size


# One call


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flash_attention_2"])
def test_plain_tensors_pass_through_untouched(implementation):
    stock, calls = recorder()
    query, key, value, mask = torch.zeros(4)
    assert route(stock, implementation, MODULE, query, key, value, mask, scaling=2.0) == ("out", "weights")
    ((args, kwargs),) = calls
    assert all(a is b for a, b in zip(args, (MODULE, query, key, value, mask), strict=True)) and kwargs == {"scaling": 2.0}


def test_plain_tensors_pass_quickly():
    x, stock = torch.zeros(1), lambda *args, **kwargs: None
    times = []
    for _ in range(500):
        begin = time.perf_counter_ns()
        route(stock, "sdpa", MODULE, x, x, x, None, dropout=0.0, scaling=1.0)
        times.append(time.perf_counter_ns() - begin)
    assert statistics.median(times) < 20_000


@pytest.mark.parametrize("implementation", ["eager", "paged|eager"])
def test_eager_gets_the_handles(implementation):
    stock, calls = recorder()
    key, value = handles()
    route(stock, implementation, MODULE, torch.zeros(2, 4, 1, 32), key, value, None)
    assert calls[0][0][2:4] == (key, value)


@pytest.mark.parametrize(("queries", "options"), [(MANY, {"softcap": 3.0}), (MANY, {"dropout": 0.1}), (1, {"dropout": 0.1})])
def test_what_is_not_fused_gets_one_dense_layer(queries, options):
    stock, calls = recorder()
    key, value = handles(queries)
    route(stock, "flash_attention_2", MODULE, torch.zeros(2, 4, queries, 32), key, value, None, **options)
    ((args, kwargs),) = calls
    assert torch.equal(args[2], key.dense()) and torch.equal(args[3], value.dense()) and kwargs == options


def masks_of(queries: int, tokens: int) -> dict[str, torch.Tensor | None]:
    """As transformers' sdpa hands them over, `[B, 1, Q, T]`: causal, with padding, and one that is neither."""
    causal = torch.ones(2, 1, queries, tokens, dtype=torch.bool).tril(tokens - queries)
    padded, odd = causal.clone(), causal.clone()
    padded[1, ..., :9] = False
    odd[0, 0, 2, 5] = False
    return {"none": None, "causal": causal, "padded": padded, "odd": odd}


@pytest.mark.parametrize("name", ["none", "causal", "padded", "odd"])
def test_many_queries_decode_no_layer(name):
    """Where the mask is causal but for padding. Another mask decodes the layer."""
    stock, calls = recorder()
    key, value = handles(MANY)
    tokens, query = 30 + MANY, torch.randn(2, 4, MANY, 32)
    mask = masks_of(MANY, tokens)[name]
    with count_decoded_layers() as decoded:
        outs = [route(stock, "sdpa", MODULE, query, key, value, mask)[0] for _ in range(2)]
    if name == "odd":
        assert len(calls) == 2 and decoded
        return
    assert not calls and not decoded and torch.equal(*outs)
    wanted = attend(query, key.attention_inputs, mask, causal=mask is None).transpose(1, 2)
    assert outs[0].is_contiguous()
    assert_close(outs[0], wanted, 1e-5)


@pytest.mark.parametrize(("name", "softcap", "chunks"), [("causal", None, True), ("padded", None, False), ("causal", 3.0, False)])
def test_chunks_take_the_place_of_tiles_that_they_outrun(name, softcap, chunks, monkeypatch):
    """Where no column is hidden, and without a softcap."""
    taken = []

    def chunked(*args, **options):
        taken.append(args)
        return attend_chunked(*args, **options)

    monkeypatch.setattr("qkvcache.attention.route.path_of", lambda *_: "tiles")
    monkeypatch.setattr("qkvcache.attention.route.attend_chunked", chunked)
    key, value = handles(9)
    query, mask = torch.randn(2, 4, 9, 32), masks_of(9, 39)[name]
    wanted = attend(query, key.attention_inputs, mask, softcap=softcap).transpose(1, 2)
    for faster in (False, True):
        monkeypatch.setattr("qkvcache.attention.route.outruns_tiles", lambda *_, faster=faster: faster)
        assert_close(route(recorder()[0], NAME, MODULE, query, key, value, mask, softcap=softcap)[0], wanted, 1e-5)
        assert bool(taken) == (chunks and faster)


def test_a_mask_that_is_written_again_is_looked_at_again():
    key, value = handles(MANY)
    query, mask = torch.randn(2, 4, MANY, 32), masks_of(MANY, 30 + MANY)["causal"]
    for columns in (0, 9, 17):
        mask[1, ..., :columns] = False
        out, _ = route(recorder()[0], "sdpa", MODULE, query, key, value, mask)
        assert_close(out, attend(query, key.attention_inputs, mask).transpose(1, 2), 1e-5)


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention", "qkvcache"])
def test_many_queries_with_learned_sinks(implementation):
    stock, calls = recorder()
    key, value = handles(MANY)
    query, sinks = torch.randn(2, 4, MANY, 32), torch.tensor([0.0, 1.0, 2.0, -1.0])
    out, _ = route(stock, implementation, MODULE, query, key, value, None, s_aux=sinks)
    assert not calls
    assert_close(out, attend(query, key.attention_inputs, causal=True, sinks=sinks).transpose(1, 2), 1e-5)


def expected(query, key, value, **options):
    return softmax_attention(query, key.dense(), value.dense(), **options).transpose(1, 2)


@pytest.mark.parametrize("queries", [1, 3, MAX_QUERIES])
@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention", "qkvcache", "kernels-community/flash-attn3"])
def test_the_rest_is_fused_with_all_its_options(implementation, queries):
    stock, calls = recorder()
    key, value = handles(queries)
    tokens, query = 30 + queries, torch.randn(2, 4, queries, 32)
    sinks = torch.tensor([0.0, 1.0, 2.0, -1.0])
    options = {"scaling": 0.2, "softcap": 3.0, "s_aux": sinks}
    with count_decoded_layers() as decoded:
        out, weights = route(stock, implementation, MODULE, query, key, value, None, **options)
        named, _ = route(stock, implementation, MODULE, query, key, value, attention_mask=None, **options)
    assert not calls and not decoded and weights is None
    assert out.is_contiguous() and out.shape == (2, queries, 4, 32) and torch.equal(out, named)
    assert_close(out.double(), expected(query, key, value, causal=True, scaling=0.2, softcap=3.0, sinks=sinks), rounding(32, tokens))


@pytest.mark.parametrize("queries", [1, 3, MAX_QUERIES])
def test_sdpa_drops_what_it_drops_at_prefill(queries):
    key, value = handles(queries)
    query, options = torch.randn(2, 4, queries, 32), {"softcap": 3.0, "s_aux": torch.ones(4)}
    with count_decoded_layers() as decoded:
        plain, _ = route(recorder()[0], "sdpa", MODULE, query, key, value, None)
        out, _ = route(recorder()[0], "sdpa", MODULE, query, key, value, None, **options)
    assert not decoded and torch.equal(out, plain)


@pytest.mark.parametrize("module", [True, False, None])
@pytest.mark.parametrize("said", [True, False, None])
def test_who_says_causal(module, said):
    """The keyword, or else the module, as transformers' own functions have it."""
    key, value = handles(3)
    query, causal = torch.randn(2, 4, 3, 32), said is not False if module is None or said is not None else module
    holder = SimpleNamespace() if module is None else SimpleNamespace(is_causal=module)
    out, _ = route(recorder()[0], "sdpa", holder, query, key, value, None, is_causal=said)
    assert_close(out.double(), expected(query, key, value, causal=causal), rounding(32, 33))


def test_the_mask_may_come_by_position_or_name():
    key, value = handles(3)
    query, mask = torch.randn(2, 4, 3, 32), torch.rand(2, 1, 3, 33) < 0.5
    a, _ = route(recorder()[0], "sdpa", MODULE, query, key, value, mask)
    b, _ = route(recorder()[0], "sdpa", MODULE, query, key, value, attention_mask=mask)
    c, _ = route(recorder()[0], "sdpa", MODULE, query, key, value, None)
    assert torch.equal(a, b) and not torch.equal(a, c)


# The attention implementation `qkvcache`


@pytest.mark.parametrize("name", ["t5", "inkling_text", "gemma2", "gpt_oss", "mimo_v2_flash"])
def test_qkvcache_attention_equals_the_models_own(name):
    """Position bias, softcap and attention sinks; with plain and with compressed layers."""
    install()
    own, other = Family(name), Family(name, NAME)
    for cache in (other.dynamic(), other.cache()):
        assert_close(other.generate(own.ids, cache, own.forced), own.base, 1e-3)


@pytest.mark.parametrize("name", ["deepseek_v4", "hy_v4", "git", "bigbird_pegasus", "bloom", "falcon"])
def test_qkvcache_attention_is_offered_where_sdpa_is(name):
    """Attention in code of the model's own, or that only eager attention has; set at once and later."""
    install()
    network = build(name)
    kind, before = type(network), network.config._attn_implementation
    wanted = rf"attn_implementation='qkvcache' on {kind.__name__}, .* use '{'sdpa' if name == 'falcon' else 'eager'}'"
    with pytest.raises(ValueError, match=wanted):
        build(name, NAME)
    if network._can_set_attn_implementation():
        with pytest.raises(ValueError, match=wanted):
            network.set_attn_implementation(NAME)
    assert network.config._attn_implementation == before


def test_empty_columns_of_a_static_cache_are_hidden():
    network, mode = model("llama", NAME), MODES["chunked"]
    static = steps(network, StaticCache(config=network.config, max_cache_len=2 * sum(mode.sizes)), mode)
    for got, expected in zip(static, steps(network, DynamicCache(config=network.config), mode), strict=True):
        assert_close(got, expected, of_model(network))


@pytest.mark.parametrize("implementation", [NAME, "flash_attention_2"])
def test_keywords_that_no_kernel_knows_reach_the_stock_function(implementation, recwarn):
    key, value = handles()
    stock, calls = recorder()
    out, _ = route(stock, implementation, MODULE, torch.randn(2, 4, 1, 32), key, value, None, block_indices=1, position_ids=2)
    assert out == "out" and calls[0][1]["block_indices"] == 1
    assert any("block_indices" in str(warning.message) for warning in recwarn)


def test_a_policy_refuses_what_is_about_columns():
    layer = H2OCache(budget=8).layer_class_to_replicate()
    query, new = torch.randn(1, 4, 12, 32), (torch.randn(1, 2, 12, 32), torch.randn(1, 2, 12, 32))
    stock, calls = recorder()
    route(stock, NAME, MODULE, query, *layer.update(*new), None)
    key, value = layer.update(*new)
    for name in ("position_bias", "block_indices"):
        with pytest.raises(NotImplementedError, match=f"{name}.*leave out the policy"):
            route(stock, NAME, MODULE, query, key, value, None, **{name: torch.zeros(1, 4, 12, 24)})
    assert len(calls) == 1
