"""Keys with a channel far above the others, which RoPE turns: few bits break them, and a layer that has them
chooses int8 for its keys."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

from qkvcache import CompressedCache, PrefixStore, demo, formats, plan, policies
from qkvcache.batching.statistics import Statistics
from qkvcache.formats import REGISTRY, resolve
from qkvcache.formats.outlying import FAR, LEAST, MOST, Int8Keys, outlying
from tests.matrix import covering
from tests.seeds import SEED

FORMAT, BROKEN = "turboquant_4bit_nc", 1
"""The format, and the layer with outlying keys."""
KINDS: dict[str, dict] = {
    "growing": {},
    "static": {"max_length": 320},
    "compileable": {"compile": True},
    "evicting": {"policy": policies.KeyDiff(budget=128)},
    "shared_budgets": {"policy": policies.SnapKV(budget=128, alpha_safeguard=0.2)},
    "reading_few": {"attention_budget": 64},
}
CHOSEN = [i == BROKEN for i in range(3)]


@functools.cache
def network(bias: float = 60.0) -> Qwen2ForCausalLM:
    """A random model whose layer `BROKEN` has a bias on a channel that turns by a radian a token, so that its
    mean is near zero."""
    torch.manual_seed(SEED)
    sizes = {"hidden_size": 128, "intermediate_size": 16, "num_hidden_layers": 3, "vocab_size": 100}
    made = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1)).eval()
    with torch.no_grad():
        for layer in made.model.layers:
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                part.weight.mul_(6)
        made.model.layers[BROKEN].self_attn.k_proj.bias[0] = bias
    return made


def ids(tokens: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 100, (rows, tokens), generator=torch.Generator().manual_seed(SEED))


@torch.no_grad()
def read(cache, *steps: torch.Tensor, **options) -> tuple[torch.Tensor, list[str]]:
    """The logits of the last step, and what the cache warned of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in steps:
            logits = network()(step, past_key_values=cache, **options).logits
    return logits, [str(x.message) for x in found if "int8" in str(x.message)]


def chosen(cache) -> list[bool]:
    return [isinstance(layer.format, Int8Keys) for layer in cache.layers]


@pytest.mark.parametrize(("kind", "prompt"), [*covering(KINDS, [150, 60], strength=1), ("growing", 60)])
def test_the_layer_alone_has_int8_keys_and_says_so(kind, prompt):
    """After a long prompt, and after a short one, before a token is quantized."""
    text = ids(prompt + 12)
    cache, steps = CompressedCache(network().config, format=FORMAT, **KINDS[kind]), (text[:, :prompt], *text[:, prompt:].split(1, dim=1))
    _, said = read(cache, *steps)
    assert chosen(cache) == CHOSEN and len(said) == 1 and f"the keys of layer {BROKEN} is 5." in said[0]
    assert f"format={FORMAT} (int8 keys in layer {BROKEN})" in repr(cache)
    plain = CompressedCache(network().config, format=[FORMAT] * 3, **KINDS[kind])
    read(plain, *steps)
    assert not any(chosen(plain)), "a format for each layer is the user's choice"
    assert cache.nbytes > plain.nbytes and cache.memory().codes > plain.memory().codes


@pytest.mark.parametrize("name", ["turboquant_4bit_nc", "int4_vllm", "hadaquant_k3v3"])
def test_the_keys_of_the_layer_keep_their_small_channels(name):
    dense = DynamicCache(config=network().config)
    read(dense, ids(200))
    errors = []
    for format in (name, [name] * 3):
        cache = CompressedCache(network().config, format=format)
        read(cache, ids(200))
        errors.append((cache.layers[BROKEN].dense()[0] - dense.layers[BROKEN].keys)[..., 4:130].std().item())
    assert errors[0] < 0.5 * errors[1]


def test_of_eight_bits_and_other_forms_nothing_changes():
    text = ids(100)
    for format in ("identity", "int8", "fp8", "turboquant_k8v4", formats.TurboQuant(center=False)):
        cache = CompressedCache(network().config, format=format)
        assert read(cache, text)[1] == [] and {layer.format for layer in cache.layers} == {resolve(format)}
    centered = [name for name in REGISTRY if Int8Keys.instead_of(REGISTRY[name])]
    assert "int4" in centered and "nvfp4" in centered and "turboquant_k8v4" not in centered and "fp8" not in centered


def test_other_models_are_not_hit():
    model, tokenizer = demo.load()
    text = torch.tensor([demo.text_ids(tokenizer)[at : at + LEAST] for at in (0, 5_000, 40_000)])
    cache = CompressedCache(model.config, format=FORMAT)
    with torch.no_grad():
        model(text, past_key_values=cache)
    assert not any(chosen(cache)) and max(outlying(layer.dense()[0]) for layer in cache.layers) < 0.95 * FAR


def test_only_valid_tokens_count():
    """Padding with outlying keys does not count, nor do rows with too few tokens."""
    keys = torch.randn(2, 1, 200, 64)
    keys[0, :, :100, 3] += 60 * torch.arange(100).cos()
    keys[1, :, :, 3] += 60 * torch.arange(200).cos()
    is_valid = torch.ones(2, 200, dtype=torch.bool)
    is_valid[0, :100], is_valid[1, : 200 - LEAST + 1] = False, False
    assert outlying(keys) > FAR and outlying(keys[:1], is_valid[:1]) < 2 and outlying(keys, is_valid) < 2
    is_valid[1, 200 - LEAST] = True
    assert outlying(keys, is_valid) > FAR
    assert outlying(keys[1:, :, : LEAST - 1]) == 0
    long = torch.randn(1, 2, MOST, 32)
    turned = long * torch.tensor([9.0] + 31 * [1.0]) * torch.tensor([1.0, -1.0]).repeat(MOST // 2)[:, None]
    assert outlying(torch.cat([turned, long], dim=2)) < 2 and outlying(torch.cat([long, turned], dim=2)) > FAR  # the last ones


@pytest.mark.parametrize("kind", ["growing", "static", "evicting"])
def test_padding_does_not_choose(kind):
    """The keys of 80 tokens of padding have an outlying channel, and the keys of 70 tokens of text have none."""
    cache, mask = CompressedCache(network().config, format=FORMAT, **KINDS[kind]), torch.ones(1, 150, dtype=torch.long)
    mask[:, :80] = 0

    def unbiased(module, args, keys):
        return keys - 60 * (torch.arange(64) == 0) * mask[..., None]

    hook = network().model.layers[BROKEN].self_attn.k_proj.register_forward_hook(unbiased)
    try:
        _, said = read(cache, ids(150), attention_mask=mask)
    finally:
        hook.remove()
    assert not said and not any(chosen(cache))


@pytest.mark.parametrize("kind", ["growing", "static", "evicting"])
def test_padded_rows_choose_as_one_and_read_on(kind):
    text, mask = ids(150, rows=2), torch.ones(2, 150, dtype=torch.long)
    mask[1, :140] = 0
    cache = CompressedCache(network().config, format=FORMAT, **KINDS[kind])
    with torch.no_grad():
        network()(text[:, :149], attention_mask=mask[:, :149], past_key_values=cache)
        together = network()(text[:, 149:], attention_mask=mask, past_key_values=cache).logits[:1]
    assert chosen(cache) == CHOSEN
    alone, _ = read(CompressedCache(network().config, format=FORMAT, **KINDS[kind]), text[:1, :149], text[:1, 149:])
    torch.testing.assert_close(together, alone, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["growing", "static", "evicting"])
def test_copies_and_the_next_prompt_keep_the_choice(kind, tmp_path):
    cache, text = CompressedCache(network().config, format=FORMAT, **KINDS[kind]), ids(151)
    read(cache, text[:, :150])
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), *cache.fork(1)]
    if kind == "growing":
        cache.save(tmp_path / "saved")
        copies.append(CompressedCache.load(tmp_path / "saved", network().config))
    expected, _ = read(cache, text[:, 150:])
    for other in copies:
        assert chosen(other) == CHOSEN
        torch.testing.assert_close(read(other, text[:, 150:])[0], expected)
    cache.reset()
    again, said = read(cache, text[:, :150], text[:, 150:])
    assert chosen(cache) == CHOSEN and not said
    torch.testing.assert_close(again, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("tokens", [150, 40])
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_a_stored_prefix_keeps_the_choice(on_disk, tokens, tmp_path):
    """Also cut to fewer tokens than are quantized."""
    options = {"max_bytes": 2**26, "format": FORMAT, "min_match_tokens": 4, "min_quantize_tokens": 16}
    options |= {"directory": tmp_path} if on_disk else {}
    text, cache = ids(151)[0], CompressedCache(network().config, format=FORMAT)
    read(cache, text[None, :150])
    store = PrefixStore(network(), **options)
    assert store.store(text[:150], cache)
    found = (PrefixStore(network(), **options) if on_disk else store).fetch(torch.cat([text[:tokens], torch.tensor([2])]))
    assert found.length == tokens and chosen(found.cache) == CHOSEN
    expected = [x[:, :, :tokens] for x in cache.layers[BROKEN].dense()]
    quantized = max(tokens - 64, 4)  # of a cut prefix, what was quantized stays so
    for got, wanted in zip(found.cache.layers[BROKEN].dense(), expected, strict=True):
        torch.testing.assert_close(got[:, :, :quantized], wanted[:, :, :quantized])
    assert read(found.cache, text[None, tokens : tokens + 1])[1] == []


def test_batches_whose_pages_are_alike_say_what_to_pass():
    dense = DynamicCache(config=network().config)
    read(dense, ids(100))
    statistics = Statistics(resolve(FORMAT))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for index, layer in enumerate([*dense.layers, dense.layers[BROKEN]]):
            statistics.of_layer(index, layer.keys)
            statistics.calibrate(index, (layer.keys, layer.values))
    (said,) = (str(x.message) for x in found)
    assert f"layer {BROKEN}" in said and "pass format='int8'" in said


def test_the_planner_says_what_it_cannot_know():
    config = network().config
    assert any("int8" in note for note in plan(config, format=FORMAT, context=1000).notes)
    assert not any("biases" in note for note in plan(config, format="int8", context=1000).notes)
    assert not any("biases" in note for note in plan(demo.load()[0].config, format=FORMAT, context=1000).notes)
