"""The attention implementation `qkvcache` on plain tensors, against softmax attention in float64."""

from types import SimpleNamespace

import pytest
import torch

from qkvcache.attention.full import QUERY_BLOCK, full_attention
from qkvcache.attention.masks import HARMLESS
from tests.reference import assert_close, count_decoded_layers
from tests.softmax import softmax_attention
from tests.tolerance import rounding

MODULE = SimpleNamespace(is_causal=True)
B, HQ, H, D, DV = 2, 4, 2, 16, 8


def naive(query, key, value, mask, causal, s_aux=None, **options):
    return softmax_attention(query, key, value, mask, causal=causal, sinks=s_aux, **options).transpose(1, 2)


def tensors(queries, tokens):
    return torch.randn(B, HQ, queries, D), torch.randn(B, H, tokens, D), torch.randn(B, H, tokens, DV)


OPTIONS = {
    "plain": {},
    "scaling": {"scaling": 0.1},
    "softcap": {"softcap": 2.0},
    "sinks": {"s_aux": torch.tensor([-2.0, 0.0, 1.0, 4.0])},
    "both": {"softcap": 2.0, "s_aux": torch.tensor([-2.0, 0.0, 1.0, 4.0]), "scaling": 0.1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("queries", "tokens"), [(1, 9), (5, 5), (5, 9), (QUERY_BLOCK, QUERY_BLOCK), (QUERY_BLOCK + 3, QUERY_BLOCK + 9)])
@pytest.mark.parametrize("mask", ["causal", "not causal", "bool", "additive", "one row"])
def test_equals_softmax_attention(queries, tokens, mask, options):
    given, kwargs = tensors(queries, tokens), {}
    if mask == "not causal":
        kwargs["is_causal"] = False
    visible = (torch.rand(B, 1, 1 if mask == "one row" else queries, tokens) < 0.5).index_fill(3, torch.tensor(0), True)
    finished = {"bool": visible, "one row": visible, "additive": torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)}.get(mask)
    out, weights = full_attention(MODULE, *given, finished, **options, **kwargs)
    assert weights is None and out.is_contiguous() and out.shape == (B, queries, HQ, DV)
    assert_close(out.double(), naive(*given, finished, mask == "causal", **options), rounding(D, tokens))


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["both"]], ids=["plain", "both"])
@pytest.mark.parametrize(("queries", "tokens"), [(1, 9), (5, 5), (5, 9)])
@pytest.mark.parametrize("mask", ["causal", "not causal", "bool", "additive"])
def test_position_bias_is_added_to_the_scores(queries, tokens, mask, options):
    given, bias = tensors(queries, tokens), 3 * torch.randn(1, HQ, queries, tokens + 2)  # as many columns as a preallocated cache
    visible = (torch.rand(B, 1, queries, tokens) < 0.5).index_fill(3, torch.tensor(0), True)
    hidden = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    finished = {"bool": visible, "additive": hidden}.get(mask)
    out, _ = full_attention(MODULE, *given, finished, position_bias=bias, is_causal=mask != "not causal", **options)
    added = bias[..., :tokens] + (0 if finished is None else hidden)
    assert_close(out.double(), naive(*given, added, mask == "causal", **options), rounding(D, tokens))


def test_keywords_are_used_or_refused():
    given = tensors(1, 9)
    plain = full_attention(MODULE, *given, None)[0]
    others = dict.fromkeys(HARMLESS, 1) | {"sliding_window": 4, "block_indices": None}
    assert torch.equal(full_attention(MODULE, *given, None, **others)[0], plain)
    for name in ("sinks", "block_indices", "indices", "new_in_some_release"):
        with pytest.raises(NotImplementedError, match=f"attention with {name}, .*'sdpa'"):
            full_attention(MODULE, *given, None, **{name: 1})


@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize("module", [SimpleNamespace(is_causal=True), SimpleNamespace(is_causal=False), SimpleNamespace()])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_who_says_causal(module, said, softcap):
    given = tensors(5, 5)
    causal = getattr(module, "is_causal", True) if said is None else said
    out, _ = full_attention(module, *given, None, is_causal=said, softcap=softcap)
    assert_close(out.double(), naive(*given, None, causal, softcap=softcap), rounding(D, given[1].shape[2]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_half_precision(dtype, softcap):
    given = tuple(x.to(dtype) for x in tensors(5, 5))
    out, _ = full_attention(MODULE, *given, None, softcap=softcap)
    assert out.dtype == dtype
    assert_close(out.double(), naive(*given, None, True, softcap=softcap), 1e-2)


def test_dropout_is_refused():
    with pytest.raises(NotImplementedError, match="model.eval()"):
        full_attention(MODULE, *tensors(2, 2), None, dropout=0.1)


def test_no_side_is_joined():
    with count_decoded_layers() as decoded:
        full_attention(MODULE, *tensors(QUERY_BLOCK + 1, QUERY_BLOCK + 1), None, softcap=1.0)
    assert not decoded
