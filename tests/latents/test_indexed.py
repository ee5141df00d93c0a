"""Layers whose indexer chooses the tokens that a query attends to: its keys stay with the latents."""

import copy
import functools
from functools import cache as cached

import pytest
import torch
import transformers as hf
from families_models import build
from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer, LinearAttentionLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from qkvcache import CompressedCache, H2OCache, PrefixStore, TurboQuantCache, attention
from qkvcache.latents.indexed import IndexedLayer
from qkvcache.releases import passing
from tests import matrix
from tests.reference import assert_close, count_decoded_layers
from tests.seeds import SEED
from tests.tolerance import of_model

SIZES = {
    name: value
    for name, value in matrix.MODELS["deepseek_v3"]().to_dict().items()
    if name.startswith(("num_", "kv_", "q_", "qk_", "v_", "n_", "hidden", "interm", "vocab", "max_", "moe_interm", "init"))
    or name.endswith("_token_id")
} | {"index_n_heads": 32, "index_head_dim": 32, "num_hidden_layers": 2, "n_group": 1, "topk_group": 1}
"""With 32 heads no two tokens have the same score: the indexer adds the scores of heads that are above 0."""
FAMILIES = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4")
WITH_STATES = ("qwen4_exp_text", "glm5_next")
"""Families with linear layers: attention without latents, whose positions the cache holds; and latents without a rotated part."""
pytestmark = pytest.mark.skipif(not hasattr(DeepseekV3Attention, "expand_kv"), reason="this transformers caches no latents")


@cached
def family(name: str, chosen: int = 24) -> hf.PreTrainedModel:
    """`chosen`: the most tokens that the indexer chooses."""
    if name not in hf.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    if name in WITH_STATES:
        return build(name)
    torch.manual_seed(SEED)
    config = hf.AutoConfig.for_model(name, index_topk=chosen, **SIZES)
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager" if name == "hy_v4" else "sdpa").eval()


def read(network: hf.PreTrainedModel, cache, ids: torch.Tensor, sizes: tuple[int, ...], mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of the tokens of all steps."""
    found, at = [], 0
    with torch.no_grad():
        for size in sizes:
            shown = None if mask is None else mask[:, : at + size]
            found.append(network(ids[:, at : at + size], attention_mask=shown, **passing(cache)).logits)
            at += size
    return torch.cat(found, 1)


def tokens(network: hf.PreTrainedModel, count: int, rows: int = 2) -> torch.Tensor:
    return torch.randint(3, network.config.get_text_config().vocab_size, (rows, count), generator=torch.Generator().manual_seed(SEED))


@pytest.mark.parametrize("limit", [None, 96], ids=["growing", "max_length"])
@pytest.mark.parametrize("name", FAMILIES + WITH_STATES)
def test_exact_layers_say_what_transformers_says(name, limit):
    network = family(name)
    ids, sizes = tokens(network, 80), (60, 1, 7, 1, 1)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    cache = CompressedCache(network.config, format="identity", max_length=limit)
    assert all(type(layer) is IndexedLayer for layer in cache.layers if not isinstance(layer, LinearAttentionLayer))
    expected = read(network, DynamicCache(config=network.config), ids, sizes, mask)
    got = read(network, cache, ids, sizes, mask)
    assert_close(got[mask[:, :70].bool()], expected[mask[:, :70].bool()], of_model(network, 80))


@pytest.mark.parametrize("make", [lambda c: DynamicCache(config=c), lambda c: CompressedCache(c, format="identity")], ids=["stock", "ours"])
def test_qkvcache_attention_reads_what_the_indexer_chose(make):
    """transformers makes masks of the choice for sdpa and eager alone, and gives others its indices."""
    network = family("deepseek_v32")
    ids, sizes = tokens(network, 80), (60, 1, 7, 1, 1)
    expected = read(network, DynamicCache(config=network.config), ids, sizes)
    attention.install()  # as any cache does
    network.set_attn_implementation("qkvcache")
    try:
        assert_close(read(network, make(network.config), ids, sizes), expected, of_model(network, 80))
    finally:
        network.set_attn_implementation("sdpa")


@pytest.mark.parametrize("format", ["int8", "turboquant_4bit_nc"])
def test_latents_and_keys_of_the_indexer_are_compressed(format):
    network = family("deepseek_v32", chosen=400)  # the choice of fewer is not continuous
    ids = tokens(network, 400)
    cache = CompressedCache(network.config, format=format, num_sink_tokens=0, residual_length=8)
    stock = DynamicCache(config=network.config)
    sizes = (390, 1, 1)
    read(network, cache, ids, sizes[:1]), read(network, stock, ids, sizes[:1])
    with count_decoded_layers() as whole:
        got = read(network, cache, ids[:, 390:], sizes[1:])
    expected = read(network, stock, ids[:, 390:], sizes[1:])
    assert not whole  # no layer is dequantized as a whole
    keys = [x for layer in stock.layers for x in (layer.keys, layer.values, layer.indexer_keys)]
    assert cache.nbytes < sum(x.nbytes for x in keys) / (2.5 if format == "int8" else 3.2)
    assert (got - expected).norm() / expected.norm() < (0.05 if format == "int8" else 0.5)


@pytest.mark.parametrize("limit", [None, 96], ids=["growing", "max_length"])
def test_rows_and_lengths_change_together(limit):
    network = family("deepseek_v32")
    ids = tokens(network, 90, rows=3)
    caches = [CompressedCache(network.config, format="identity", max_length=limit) for _ in range(2)]
    for cache in caches:
        read(network, cache, ids, (70, 1))
    cropped, kept = caches
    cropped.crop(-11)
    read(network, cropped, ids[:, 60:], (10, 1))
    order = torch.tensor([2, 0, 2])
    for cache in caches:
        cache.reorder_cache(order)
    (branch,) = cropped.fork(1)
    got = [read(network, cache, ids[order, 71:], (1, 5)) for cache in (cropped, kept, branch)]
    for other in got[1:]:
        assert_close(got[0], other, of_model(network, 90))
    cropped.reset()
    assert cropped.get_seq_length() == 0
    fresh = CompressedCache(network.config, format="identity", max_length=limit)
    assert_close(read(network, cropped, ids, (40, 2)), read(network, fresh, ids, (40, 2)), of_model(network, 90))


@torch.no_grad()
def test_a_compiled_step_is_one_graph():
    network = family("deepseek_v32")
    ids = tokens(network, 70)
    found = []
    for compiled in (False, True):
        cache = CompressedCache(network.config, format="identity", max_length=96)
        read(network, cache, ids, (60,))
        step = torch.compile(network.forward, backend="eager", fullgraph=True) if compiled else network.forward
        found += [torch.cat([step(ids[:, at : at + 1], **passing(cache)).logits for at in (60, 61, 62)])]
    assert_close(*found, of_model(network, 70))


def test_generate_with_and_without_beams():
    network = family("deepseek_v32")
    ids = tokens(network, 30, rows=1)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    for more in ({"num_beams": 3}, {}):
        expected = network.generate(ids, **passing(DynamicCache(config=network.config)), **options, **more)
        got = network.generate(ids, **passing(CompressedCache(network.config, format="identity")), **options, **more)
        assert torch.equal(got.sequences, expected.sequences)


def test_other_uses_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="compile=True with indexed attention: pass max_length"):
        TurboQuantCache(family("deepseek_v32").config, compile=True)
    for name in ("deepseek_v32", *WITH_STATES):
        with pytest.raises(NotImplementedError, match="its indexer selects keys by column"):
            H2OCache(family(name).config, budget=16)


@pytest.mark.parametrize("name", WITH_STATES)
def test_every_tensor_of_the_indexer_moves_with_its_rows(name):
    """Positions, and what an indexer stores beside keys, which stays exact."""
    network = family(name)
    if name == "qwen4_exp_text" and not hasattr(DynamicIndexedLayer(), "indexer_position_ids"):
        pytest.skip("this transformers keeps positions beside the layers, and does not reorder them")
    ids, order = tokens(network, 70), torch.tensor([1, 0, 1])
    caches = [kind(network.config) for kind in (lambda c: CompressedCache(c, format="int8"), lambda c: DynamicCache(config=c))]
    for cache in caches:
        read(network, cache, ids, (60, 1))
        cache.reorder_cache(order)
        read(network, cache, ids[order, 61:], (1,))
    ours, theirs = (next(x for x in cache.layers if isinstance(x, IndexedLayer | DynamicIndexedLayer)) for cache in caches)
    if ours.indexer_position_ids is not None:
        assert torch.equal(ours.indexer_position_ids, theirs.indexer_position_ids)
    exact = name == "glm5_next"
    assert_close(ours.dense_indexer(), theirs.indexer_keys, of_model(network, 70) if exact else 2e-2)
    assert ours.keys.shape[2] == theirs.keys.shape[2]


@pytest.mark.parametrize("kind", ["memory", "disk", "dense", "of a DynamicCache", "exact, of a DynamicCache"])
def test_a_prefix_brings_the_keys_of_the_indexer(kind, tmp_path):
    """Half of a stored prompt goes on as the cache that read it at once; entries of a DynamicCache as that."""
    network, stock = family("deepseek_v32"), kind.endswith("DynamicCache")
    ids, format = tokens(network, 90, rows=1), "int8" if kind in ("memory", "disk") else "identity"
    options = {"dense": kind == "dense", "min_quantize_tokens": 256 if kind.startswith("exact") else 1}
    options |= {"max_bytes": 2**22, "format": format, "residual_length": 8, "num_sink_tokens": 2}
    make = functools.partial(PrefixStore, network, directory=tmp_path if kind == "disk" else None, **options)
    store = make()
    if stock:
        cache = DynamicCache(config=network.config)
        read(network, cache, ids, (80,))
        store.store(ids[:, :80], cache)
    else:
        with store.reuse(ids[:, :80]) as past:
            read(network, past, ids, (80,))
    store = make() if kind == "disk" else store
    prompt = torch.cat([ids[:, :50], ids[:, 80:]], 1)
    found = store.fetch(prompt)
    assert (found.length, found.source) == (50, "disk" if kind == "disk" else "memory")
    cold = CompressedCache(network.config, format=format, residual_length=8, num_sink_tokens=2)
    read(network, cold, ids, (80,))
    cold.crop(-30)
    got, expected = (read(network, cache, ids[:, 80:], (1, 4, 1)) for cache in (found.cache, cold))
    assert type(found.cache) is (DynamicCache if kind == "dense" else CompressedCache)
    assert_close(got, expected, of_model(network, 90))


def test_memory_counts_the_indexer():
    network = family("deepseek_v32")
    cache = CompressedCache(network.config, format="int8")
    read(network, cache, tokens(network, 50), (50,))
    assert {"codes", "scales"} <= {role for layer in cache.layers for role, _ in layer.tensors()}
    twin = copy.deepcopy(cache)
    assert twin.nbytes == cache.nbytes
    codes = [x for layer in cache.layers for x in layer.indexer_codes.values()]
    assert len(codes) == 2 * len(cache.layers) and cache.nbytes > sum(x.nbytes for x in codes)
    stock = DynamicCache(config=network.config)
    read(network, stock, tokens(network, 50), (50,))
    assert cache.memory().dense == sum(x.nbytes for layer in stock.layers for x in (layer.keys, layer.values, layer.indexer_keys))
