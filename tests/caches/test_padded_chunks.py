"""A short row of a left-padded batch that is read in chunks, of which the first are padding alone, is stored as well as the row alone."""

import functools

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

from qkvcache import CompressedCache, policies
from qkvcache.attention.route import route
from qkvcache.formats import FP8, Int8
from qkvcache.layers.compressed import CompressedLayer
from qkvcache.releases import passing
from tests.matrix import covering
from tests.seeds import SEED

LONG, SHORT, CHUNK, ANSWER = 100, 36, 32, 12
KINDS = {
    "growing": {},
    "preallocated": {"max_length": 128},
    "evicting": {"policy": policies.KeyDiff(budget=96)},
    "evicting_by_head": {"policy": policies.AdaKV(policies.SnapKV(budget=96, window_size=8))},
    "evicting_preallocated": {"policy": policies.KeyDiff(budget=96), "max_length": 128},
}


@functools.cache
def biased(attention: str = "sdpa") -> PreTrainedModel:
    """A tiny model whose keys have a large constant part in the channels that RoPE turns slowest, as Qwen2's."""
    torch.manual_seed(SEED)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=97, head_dim=64, rope_theta=1e6, eos_token_id=None, pad_token_id=0, **sizes)
    config._attn_implementation = attention
    model = Qwen2ForCausalLM(config).eval()
    for layer in model.model.layers:
        with torch.no_grad():
            layer.self_attn.q_proj.weight *= 8
            layer.self_attn.k_proj.weight *= 8
            bias = layer.self_attn.k_proj.bias.view(2, 2, 32)
            bias.zero_()[..., -6:] = torch.tensor([20.0, -20.0])[:, None]
    return model


@torch.no_grad()
def answer(model: PreTrainedModel, cache, rows: list[int], chunk: int) -> torch.Tensor:
    """The log-probabilities of a fixed continuation of the last of `rows`, `[ANSWER, V]`. Row 1 is the short one; alone, it is not padded.
    The last chunk of the prompt has 4 tokens."""
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(1, 97, (2, LONG + ANSWER), generator=generator)[rows]
    mask = torch.ones_like(ids)
    if rows == [1]:
        ids, mask = ids[:, LONG - SHORT :], mask[:, LONG - SHORT :]
    else:
        mask[1, : LONG - SHORT] = 0
    prompt, positions, found, begin = ids.shape[1] - ANSWER, (mask.cumsum(1) - 1).clamp_min(0), [], 0
    ends = [*range(prompt - 4, 0, -chunk)][::-1] + list(range(prompt, prompt + ANSWER + 1))
    for end in ends:
        step = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]} | passing(cache)
        out, begin = model(ids[:, begin:end], **step).logits[-1, -1], end
        found.append(out.log_softmax(-1))
    return torch.stack(found[-ANSWER:])


def divergence(model: PreTrainedModel, rows: list[int], chunk: int = CHUNK, format="int8", **options) -> float:
    """The KL divergence of the answer from that of the same cache without a format."""
    cache = CompressedCache(model.config, format=format, residual_length=8, **options)
    exact = CompressedCache(model.config, **options) if "policy" in options else DynamicCache(config=model.config)
    return float(F.kl_div(answer(model, cache, rows, chunk), answer(model, exact, rows, chunk), log_target=True, reduction="batchmean"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_row_in_chunks_is_as_close_as_alone(kind):
    model = biased()
    alone = divergence(model, [1], **KINDS[kind])
    assert 0 < divergence(model, [0, 1], **KINDS[kind]) < 4 * alone


@pytest.mark.parametrize(
    ("format", "attention"), covering(["turboquant_4bit_nc", "hadaquant_k3v3", FP8(scale="tensor")], ["sdpa", "eager"], strength=1), ids=str
)
def test_a_short_row_in_any_format_is_as_close_as_alone(format, attention):
    model = biased(attention)
    assert 0 < divergence(model, [0, 1], format=format) < 4 * divergence(model, [1], format=format)


def test_statistics_begin_with_a_rows_first_token():
    """The means of a row whose text began in the first chunk do not change."""
    model, cache = biased(), CompressedCache(biased().config, format="int8")
    ids, mask = torch.randint(1, 97, (3, 30)), torch.ones(3, 30, dtype=torch.int64)
    mask[1, :20], mask[2, :5] = 0, 0
    found = []
    for begin in (0, 10, 20):
        with torch.no_grad():
            model(ids[:, begin : begin + 10], attention_mask=mask[:, : begin + 10], **passing(cache))
        tokens = cache.layers[1].storage.tokens
        found.append(tokens.statistics[0]["center"].clone())
        assert tokens.begun.tolist() == [True, begin == 20, True] and tokens.calibrated == (begin == 20)
    assert torch.equal(found[0][[0, 2]], found[2][[0, 2]]) and not found[1][1].any() and found[2][1].any()
    cache.crop(-30)
    assert not tokens.begun.any() and not tokens.calibrated


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_short_row_in_compiled_chunks_as_in_others(attention):
    """Statistics and tokens; operators read statistics that were written in the same graph."""
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 1, True
    stock = {"sdpa": sdpa_attention_forward, "eager": eager_attention_forward}[attention]
    generator = torch.Generator().manual_seed(SEED)
    key, value, query = (torch.randn(2, 2, 48, 32, generator=generator) for _ in range(3))
    key[..., :4] += 30
    valid = torch.tensor([[True] * 48, [False] * 20 + [True] * 28])
    visible = torch.ones(48, 64, dtype=torch.bool).tril() & F.pad(valid, (0, 16))[:, None, None]
    mask = visible if attention == "sdpa" else torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)

    def step(layer, key, value, query, mask):
        key, value = layer.update(key, value)
        return route(stock, attention, module, query, key, value, mask, scaling=0.2)[0]

    found = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        layer, outputs = CompressedLayer(Int8(), 2, 4, max_length=64), []
        layer.lazy_initialization(key, value)
        for begin in (0, 16, 32):
            now = slice(begin, begin + 16)
            with torch.no_grad(), torch.compiler.set_stance("default"):
                columns, _ = layer.get_mask_sizes(16)
                outputs.append(run(layer, key[:, :, now], value[:, :, now], query[:, :, now], mask[:, :, now, :columns])[:, 4:])
        assert layer.storage.tokens.begun.all()
        found.append((outputs[0][:1], outputs[2], layer.storage.tokens.statistics[0]["center"], *layer.dense()))
    torch.compiler.reset()
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_padding_is_no_evidence_of_biased_keys(recwarn):
    """It has one key, whose mean is all that it is; and is no reason to look no further."""
    plain = biased.__wrapped__()
    for layer in plain.model.layers:
        layer.self_attn.k_proj.bias.data.zero_()
    for model, expected in ((plain, 0), (biased(), 1)):
        cache, ids = CompressedCache(model.config, format=Int8(center=False)), torch.randint(1, 97, (1, 60))
        mask = (torch.arange(60) >= 30).long()[None]
        recwarn.clear()
        for begin in (0, 20, 40):
            with torch.no_grad():
                positions = (mask.cumsum(1) - 1).clamp_min(0)[:, begin : begin + 20]
                model(ids[:, begin : begin + 20], attention_mask=mask[:, : begin + 20], position_ids=positions, **passing(cache))
        assert sum("center=True" in str(x.message) for x in recwarn) == expected
