"""What else caches that evict go through: streams, forks, turns, beams, other budgets, and what they refuse."""

import copy
import functools

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from qkvcache import CombinedCache, CompressedCache, H2OCache, SinkCache, SlidingWindowCache
from qkvcache.attention import install, installed, uninstall
from qkvcache.policies import H2O, SinkWindow
from qkvcache.releases import passing
from tests.evict.matrix import NAMED, KeyNorm
from tests.evict.test_eviction import check_rows, inputs, kept
from tests.matrix import ATTENTION, covering, model, slowly
from tests.reference import assert_close, forward, run
from tests.tolerance import of_model, turned

MOVES = {
    "reorder_cache": (torch.tensor([2, 0, 0]), torch.tensor([2, 0, 0])),
    "batch_repeat_interleave": (2, torch.tensor([0, 0, 1, 1, 2, 2])),
    "batch_select_indices": (torch.tensor([1]), torch.tensor([1])),
}
"""Methods that change the rows of a cache of three: their argument, and the row before of each row after."""

FORMATS = [None, "int8", "turboquant_3bit_nc"]
FEW = ["sink_window", "h2o", "snapkv", "keydiff"]  # the others run with matrix.ALL
EACH = slowly(NAMED, [*FEW, "snapkv_shared"])


def llama(attention="sdpa"):
    return model("llama", attention, layers=2)


def prompt(rows=1, length=40, seed=1):
    """Rows padded by 0, 5, 10, ... tokens, as keywords."""
    ids, mask = inputs(range(0, 5 * rows, 5), length, seed)
    return {"input_ids": ids, "attention_mask": mask}


generate = functools.partial(run, max_new_tokens=8)


def say(cache, ids):
    """Logits of all `ids` `[B, T]`, no padding."""
    with torch.no_grad():
        return llama()(ids, **passing(cache)).logits


def evicting(policy=None, format=None, **options):
    return CompressedCache(llama().config, policy=policy or H2O(budget=14, recent=4), format=format, **options)


def state(cache):
    """Everything that a cache holds, in copies; not what lies in slots that nobody has written."""
    held = [cache.kept_positions(i) for i in range(2)]
    for layer in cache.layers:
        held += [x.clone() for x in (*layer.dense(), *(x for _, x in layer.storage.metadata.named_tensors()))]
        for side in (0, 1):
            held += [x.clone() for packed in layer.storage.tokens.packed(side, 10**6) for x in packed.codes.values()]
    return held


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_nothing_is_left_behind():
    """DynamicCache says the same bit for bit before, beside and after a cache that evicts, and uninstall gives transformers back."""
    network, inputs, was = llama(), prompt(2), installed()
    uninstall()
    before = AttentionInterface.get_interface, dict(ALL_ATTENTION_FUNCTIONS._global_mapping)
    try:
        plain = [generate(network, DynamicCache(config=network.config), inputs, output_logits=True, return_dict_in_generate=True).logits]
        generate(network, evicting(), inputs)
        assert AttentionInterface.get_interface is not before[0]
        plain += [generate(network, DynamicCache(config=network.config), inputs, output_logits=True, return_dict_in_generate=True).logits]
        uninstall()
        assert (AttentionInterface.get_interface, dict(ALL_ATTENTION_FUNCTIONS._global_mapping)) == before
        plain += [generate(network, DynamicCache(config=network.config), inputs, output_logits=True, return_dict_in_generate=True).logits]
    finally:
        (install if was else uninstall)()
    assert same(plain[0], plain[1]) and same(plain[0], plain[2])


@pytest.mark.parametrize("format", FORMATS)
def test_bytes_do_not_grow_with_the_prompt(format):
    held = {}
    for length in (256, 1024):
        cache = evicting(H2O(budget=128, recent=32), format, residual_length=16)
        x = torch.randn(1, length, 64)
        layer = llama().model.layers[0].self_attn
        with torch.no_grad():
            cos, sin = llama().model.rotary_emb(x, torch.arange(length)[None])
            layer(x, position_embeddings=(cos, sin), attention_mask=None, **passing(cache))
        assert cache.stored_length(0) == 128
        held[length] = cache.nbytes
    assert len(set(held.values())) == 1
    full = CompressedCache(llama().config, format=format or "identity", residual_length=16)
    say(full, torch.randint(3, 100, (1, 128)))
    assert held[1024] <= full.nbytes / 2 + 128 * 2 * 64  # one of two layers, what the policy remembers, shared scales, idle slots


@pytest.mark.parametrize("format", slowly(FORMATS, ["int8"]))
@pytest.mark.parametrize("name", EACH)
def test_reset_makes_it_new(name, format):
    cache = evicting(NAMED[name](14), format, residual_length=3)
    generate(llama(), cache)
    cache.reset()
    assert cache.nbytes == cache.get_seq_length() == cache.stored_length() == 0
    fresh, inputs = evicting(NAMED[name](14), format, residual_length=3), prompt(3, 31, seed=4)
    assert torch.equal(generate(llama(), cache, inputs), generate(llama(), fresh, inputs))
    assert same(state(cache), state(fresh))


@pytest.mark.parametrize("format", slowly(FORMATS, ["int8"]))
@pytest.mark.parametrize("name", EACH)
def test_a_question_to_a_copy_leaves_the_context_as_it_was(name, format):
    cache, untouched = (evicting(NAMED[name](14), format, residual_length=3) for _ in range(2))
    context, question = prompt()["input_ids"], prompt(seed=5)["input_ids"][:, :6]
    for one in (cache, untouched):
        say(one, context)
    before, fork = state(cache), copy.deepcopy(cache)
    answer = [say(fork, part) for part in question.split(2, 1)]
    assert same(state(cache), before) and not same(state(fork), before)
    for one in (cache, untouched):
        assert same([say(one, part) for part in question.split(2, 1)], answer)
    assert same(state(cache), state(fork))


@pytest.mark.parametrize("attention", slowly(ATTENTION, ["sdpa", "eager"]))
def test_budgets_of_each_layer(attention):
    """A padded row is as alone, though transformers makes one mask, as wide as the first layer needs, and others hold more."""
    network, sizes = model("llama", attention), (30, *[1] * 7)
    make = functools.partial(CompressedCache, network.config)
    check_rows(network, functools.partial(make, policy=KeyNorm(budget=12, recent=3), skip_layers=[1]), sizes)
    cache = check_rows(network, functools.partial(make, policy=KeyNorm(budget=[12, 0.5, 25], recent=3, interval=1)), sizes)
    assert [cache.stored_length(i) for i in range(3)] == [12, 37 // 2, 25]
    with pytest.raises(ValueError, match="budgets by layer need the config"):
        CompressedCache(policy=KeyNorm(budget=[12, 24]))
    assert len(make(policy=KeyNorm(budget=[12, 24]), skip_layers=[1]).layers) == 3


@pytest.mark.parametrize("attention", slowly(ATTENTION, ["sdpa"]))
@pytest.mark.parametrize("name", EACH)
def test_turns_of_different_lengths(name, attention):
    """Padding in the middle of a conversation: each row is as alone without it."""
    ids, mask = inputs((0, 4, 9), 46)
    mask[0, 24:30] = mask[2, 24:27] = 0  # the second turn is padded on its left too
    make = functools.partial(CompressedCache, llama().config, policy=NAMED[name](15))
    check_rows(llama(attention), make, (20, *[1] * 4, 12, *[1] * 10), text=(ids * mask, mask))


SEVERAL = {
    "beams": {"num_beams": 4},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "sequences": {"num_return_sequences": 3, "do_sample": True},
}


@pytest.mark.parametrize(("name", "several"), covering(slowly(NAMED, [*FEW, "snapkv_shared"]), SEVERAL, strength=1))
def test_beams(name, several):
    """As DynamicCache while the budget is large; with a small one the cache of each beam is that of its own text."""
    network, inputs, options = llama(), prompt(2), SEVERAL[several]
    expected = generate(network, DynamicCache(config=network.config), inputs, **options)
    assert torch.equal(generate(network, evicting(NAMED[name](60)), inputs, **options), expected)
    generate(network, cache := evicting(NAMED[name](14)), inputs, **options)
    held = (cache.kept_positions() >= 0).sum((1, 2))
    assert (held == 2 * 14).all() and len(held) == 2 * max(options.values())


@pytest.mark.parametrize("format", slowly(FORMATS, ["int8"]))
@pytest.mark.parametrize("name", EACH)
def test_rows_move_with_all_that_is_known_of_them(name, format):
    """Reordered, repeated and selected rows go on as they would have."""
    _, mask = prompt(3).values()
    ids, new = (3 + torch.stack([torch.randperm(97)[:45] for _ in range(3)])).split([40, 5], 1)  # no two of the same norm
    network, cache = llama(), evicting(NAMED[name](14), format, residual_length=3)
    forward(network, cache, ids, mask, 0, 40)

    def go_on(cache, rows):
        text, is_valid = torch.cat([ids, new], 1)[rows], torch.cat([mask, torch.ones_like(new)], 1)[rows]
        logits = [forward(network, cache, text, is_valid, a, a + 1) for a in range(40, 45)]
        return torch.stack(logits, 1), [kept(cache, row) for row in range(len(rows))]

    expected, before = go_on(copy.deepcopy(cache), torch.arange(3))
    for method, (argument, rows) in MOVES.items():
        moved = copy.deepcopy(cache)
        getattr(moved, method)(argument)
        logits, positions = go_on(moved, rows)
        assert_close(logits, expected[rows], turned(format) if format else of_model(network))
        assert positions == [before[row] for row in rows]


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 4}, {"assistant_model": "qwen3"}], ids=str)
def test_steps_back_are_refused(options):
    options = {key: model(x) if isinstance(x, str) else x for key, x in options.items()}
    with pytest.raises((NotImplementedError, ValueError), match="take steps back|crop|rollback|roll back"):
        generate(llama(), evicting(), {"input_ids": torch.arange(3, 13).repeat(4)[None]}, **options)


def test_a_refused_call_changes_nothing():
    cache, x = evicting(), torch.randn(1, 2, 1, 32)
    say(cache, prompt()["input_ids"])
    before = state(cache), cache.get_seq_length()
    calls = {
        "crop(-2)": (lambda: cache.crop(-2), NotImplementedError),
        "crop(2)": (lambda: cache.crop(2), ValueError),
        "batch": (lambda: cache.update(x.repeat(2, 1, 1, 1), x.repeat(2, 1, 1, 1), 0), ValueError),
        "dtype": (lambda: cache.update(x.double(), x.double(), 0), ValueError),
        "lengths": (lambda: cache.update(x, x.repeat(1, 1, 2, 1), 0), ValueError),
        "gradient": (lambda: cache.update(x.clone().requires_grad_(), x, 0), NotImplementedError),
        "layer": (lambda: cache.kept_positions(9), ValueError),
    }
    for what, (call, error) in calls.items():
        with pytest.raises(error):
            call()
        assert same(state(cache), before[0]) and cache.get_seq_length() == before[1], what
    cache.crop(0)
    assert say(cache, torch.tensor([[5]])).isfinite().all()


def test_named_caches_are_their_policies():
    config, ids, heavy = llama().config, prompt()["input_ids"], H2O(budget=16, recent=6, num_sink_tokens=2)
    pairs = [
        (
            SinkCache(config, window_length=10, num_sink_tokens=2),
            CompressedCache(config, policy=SinkWindow(window_length=10, num_sink_tokens=2, positions="cache")),
        ),
        (SlidingWindowCache(config, window_length=10), CompressedCache(config, policy=SinkWindow(window_length=10, num_sink_tokens=0))),
        (
            H2OCache(config, budget=14, recent=4, num_sink_tokens=1),
            CompressedCache(config, policy=H2O(budget=14, recent=4, num_sink_tokens=1)),
        ),
        (H2OCache(config, budget=0.5, format="int8"), CompressedCache(config, policy=H2O(budget=0.5), format="int8")),
        (
            CombinedCache(config, num_sink_tokens=2, recent=6, heavy=8),
            CompressedCache(config, policy=heavy, format="fp8", num_sink_tokens=2),
        ),
    ]  # fmt: skip
    for named, plain in pairs:
        assert same([say(named, part) for part in ids.split(20, 1)], [say(plain, part) for part in ids.split(20, 1)])
        assert same(state(named), state(plain))
    say(combined := CombinedCache(config, num_sink_tokens=4, recent=8, heavy=0.25), ids)
    assert combined.stored_length() == 4 + 8 + 10 - 7  # places of the budget that the interval leaves empty
