"""Models with sliding layers: the answers and logits are those of transformers' own batching, with the window's tokens alone in pages."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers as hf

from qkvcache import continuous_batching
from qkvcache.formats import Int4, Int8
from tests.matrix import _HYBRID, _NO_HEAD_DIM, _TINY, covering
from tests.seeds import SEED

from .requests import answers, assert_same, collect, greedy, pool, prompts, serving, single, waiting

ALTERNATING = _TINY | _HYBRID
FAMILIES = {
    "gemma2": lambda **options: hf.Gemma2Config(**ALTERNATING | options, attn_logit_softcapping=2.0, query_pre_attn_scalar=32),
    "gemma3": lambda **options: hf.Gemma3TextConfig(**ALTERNATING | options),
    "gpt_oss": lambda **options: hf.GptOssConfig(**ALTERNATING | options, num_local_experts=4, num_experts_per_tok=2),
    "olmo3": lambda **options: hf.Olmo3Config(**_NO_HEAD_DIM | _HYBRID | options),
    "cohere2": lambda **options: hf.Cohere2Config(**ALTERNATING | options),
    "exaone4": lambda **options: hf.Exaone4Config(**ALTERNATING | options),
    "mistral": lambda **options: hf.MistralConfig(**_TINY | {"sliding_window": 16} | options),
}
EAGER = ("gemma2", "gpt_oss")  # transformers' sdpa has neither softcap nor attention sinks


@functools.lru_cache
def network(family: str, window: int = 16):
    config = FAMILIES[family](sliding_window=window)
    torch.manual_seed(SEED)
    implementation = "eager" if family in EAGER else "sdpa"
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


def logits_of(net, ids: list[list[int]], new: int, **options) -> list[torch.Tensor]:
    """The logits of each step of the batch."""
    found: list[torch.Tensor] = []
    hook = net.register_forward_hook(lambda module, args, out: found.append(out.logits[0].clone()))
    try:
        net.generate_batch(ids, generation_config=greedy(new), continuous_batching_config=pool(**options), warmup=False)
    finally:
        hook.remove()
    return found


@pytest.mark.parametrize(
    ("family", "window"), [*((name, 100) for name in FAMILIES if name != "gemma2"), ("gemma3", 16), ("gpt_oss", 16), ("mistral", 16)]
)
def test_logits_are_those_of_transformers_batching(family, window):
    """A prompt is longer than the window and is read in chunks; tokens follow. transformers' eager batching leaves out the
    softcap of gemma2."""
    net, ids = network(family, window), prompts(245)
    expected = logits_of(net, ids, 16, max_batch_tokens=90)
    with continuous_batching(net, "identity", num_sink_tokens=2, residual_length=4):
        got = logits_of(net, ids, 16, max_batch_tokens=90)
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral"])
def test_requests_together_answer_as_each_alone(family):
    """Answers are those of transformers' cache. Where full layers need a second page, the pool is too small, and requests begin again."""
    net, ids, new = network(family), prompts(63, 60, 62, 61, 59), 8
    small = {"blocks": 5, "safety_margin": 0.0}
    with continuous_batching(net, "identity", num_sink_tokens=2, residual_length=4) as batching, serving(net, new, **small) as manager:
        with waiting(net):
            names = manager.add_requests(ids)
        found = collect(manager, names)
        assert (batching.metrics().preemptions > 0) == (family != "mistral") and batching.metrics().pages_used == 0
    alone = [single(net, one, None, new, cache=hf.DynamicCache(config=net.config)) for one in ids]
    assert sum(assert_same(found[name].generated_tokens, one) for name, one in zip(names, alone, strict=True)) > 10


def test_a_request_holds_the_blocks_of_a_window():
    """Blocks of sliding layers do not grow with the request; those of full layers do."""
    net, counts = network("gemma3", 100), []
    with continuous_batching(net, "int8"), serving(net, new=80) as manager:
        sliding, full = manager.cache.allocators
        hook = net.register_forward_hook(
            lambda *_: counts.append([[len(blocks) for blocks in held.block_table.values()] for held in (sliding, full)])
        )
        answers(manager, prompts(300))
        hook.remove()
        assert counts[-1] == [[2], [6]]
        assert sliding.bytes_per_block == full.bytes_per_block == manager.cache.bytes_per_sector
        assert not sliding.block_table and not full.block_table


class Quantizing(hf.DynamicCache):
    """A cache of all tokens, of which a step reads those before the last `recent` as a format stores them."""

    def __init__(self, format, recent: int):
        super().__init__()
        self.format, self.recent = format, recent

    def update(self, key, value, layer, *args, **kwargs):
        new, sides = key.shape[2], super().update(key, value, layer, *args, **kwargs)
        stored = max(sides[0].shape[2] - new - self.recent - (new > 1), 0)  # a chunk comes before its first token is in the ring
        found = []
        for codec, x in zip(self.format.codecs(), sides, strict=True):
            old = codec.dequantize(codec.quantize(x[:, :, :stored], {}), x.shape[3], x.dtype) if stored else x[:, :, :0]
            found.append(torch.cat([old, x[:, :, stored:]], dim=2))
        return tuple(found)


@pytest.mark.parametrize(("family", "rule"), covering(["gemma2", "gemma3", "gpt_oss", "mistral"], [Int8, Int4], strength=1))
def test_quantized_windows(family, rule):
    """The same tokens as a cache that keeps everything and reads it as codes, while pages are written again and again."""
    net, ids, format = network(family, 100), prompts(245)[0], rule(center=False)
    with continuous_batching(net, format, num_sink_tokens=0, residual_length=5), serving(net, max_batch_tokens=90) as manager:
        (got,) = answers(manager, [ids])
    assert assert_same(got, single(net, ids, format, chunk=90, cache=Quantizing(format, 5)))


def test_forks_have_windows_of_their_own():
    net = network("gemma3")
    config = hf.GenerationConfig(max_new_tokens=40, do_sample=True, temperature=2.0, num_return_sequences=3, eos_token_id=-1)
    with continuous_batching(net, "identity"):
        found = net.generate_batch(prompts(100), config, pool(per_request_processors=True))
    texts = [output.generated_tokens for output in found.values()]
    assert len({tuple(tokens) for tokens in texts}) == 3
    for tokens in texts:
        whole = torch.tensor([prompts(100)[0] + tokens])
        chosen = net(whole).logits[0, 99:-1].log_softmax(-1).gather(1, whole[0, 100:, None])
        assert chosen.mean() > -6 and len(tokens) == 40
