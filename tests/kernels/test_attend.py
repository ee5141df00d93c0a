"""`attend` and its two halves, against softmax attention in float64 over the decoded tokens."""

import pytest
import torch
from torch import Tensor

from qkvcache.formats import Codec
from qkvcache.kernels import AttentionInputs, Exact, KeysOrValues, Packed, attend, pv, qk
from tests.matrix import COVER, FORMATS
from tests.reference import assert_close
from tests.softmax import softmax_attention
from tests.tolerance import rounding

from .attention_inputs import exactly

TOKENS = 40
# Of the output; half a unit in its last place where that is more.
TOLERANCES = {torch.float32: rounding(128, TOKENS), torch.float16: 2**-11, torch.bfloat16: 2**-8}


def make_side(codec: Codec, x: Tensor, first: int = 3, recent: int = 5, block: int = 7) -> KeysOrValues:
    """`x` as exact tokens, packed blocks and exact tokens."""
    region = x[:, :, first : x.shape[2] - recent]
    statistics = codec.calibrate(region[:, :, :block])
    packed = [Packed(codec, codec.quantize(b, statistics) | statistics, b.shape[2], x.shape[3]) for b in region.split(block, dim=2)]
    return KeysOrValues.of((Exact(x[:, :, :first]), *packed, Exact(x[:, :, x.shape[2] - recent :])), tuple(x.shape), x.dtype, x.device)


def make_payload(format="turboquant_4bit_nc", heads=2, dims=(64, 64), dtype=torch.float32, batch=2, **zones) -> AttentionInputs:
    format = FORMATS[format]
    key, value = (torch.randn(batch, heads, TOKENS, dim).to(dtype) for dim in dims)
    return AttentionInputs(make_side(format.key, key, **zones), make_side(format.value, value, **zones))


def check(query, attention_inputs, *args, tolerance=TOLERANCES[torch.float32], **kwargs):
    out = attend(query, attention_inputs, *args, **kwargs)
    assert out.dtype == query.dtype
    expected = softmax_attention(query, exactly(attention_inputs.key), exactly(attention_inputs.value), *args, **kwargs)
    assert_close(out.double(), expected, tolerance)


@pytest.mark.sums
@pytest.mark.parametrize("dims", [(64, 64), (64, 32), (96, 128)])
@pytest.mark.parametrize("format", COVER)
def test_every_format(format, dims):
    attention_inputs = make_payload(format, dims=dims)
    check(torch.randn(2, 4, 3, dims[0]), attention_inputs, causal=True)


@pytest.mark.parametrize("format", COVER)
def test_scores_and_mix(format):
    attention_inputs = make_payload(format)
    q, p = torch.randn(2, 2, 5, 64), torch.rand(2, 2, 5, TOKENS)
    assert_close(qk(q, attention_inputs.key).double(), q.double() @ exactly(attention_inputs.key).mT, rounding(64, 64))
    assert_close(pv(p, attention_inputs.value).double(), p.double() @ exactly(attention_inputs.value), rounding(64, TOKENS))


@pytest.mark.parametrize("zones", [{"first": 0}, {"recent": 0}, {"first": 0, "recent": 0}, {"first": 34}, {"block": 100}, {"block": 1}])
def test_any_row_of_segments(zones):
    check(torch.randn(2, 4, 2, 64), make_payload(**zones))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("format", ["identity", "fp8", "turboquant_3bit_nc"])
def test_dtypes(format, dtype):
    """Decoded tokens are never rounded to the dtype; the output is, once."""
    attention_inputs = make_payload(format, dtype=dtype)
    check(torch.randn(2, 4, 3, 64).to(dtype), attention_inputs, tolerance=TOLERANCES[dtype])


@pytest.mark.parametrize("queries", [1, 2, 7, 16])
@pytest.mark.parametrize(("query_heads", "heads"), [(4, 4), (6, 2), (4, 1)])
def test_grouped_queries(query_heads, heads, queries):
    attention_inputs = make_payload(heads=heads)
    query = torch.randn(2, query_heads, queries, 64)
    check(query, attention_inputs)
    check(query, attention_inputs, causal=True)


MASKS = {
    "keys": (2, 1, 1, TOKENS),
    "rows": (2, 1, 3, TOKENS),
    "one for all": (1, 1, 3, TOKENS),
    "each head": (2, 4, 3, TOKENS),
    "one row, each head": (1, 4, 3, TOKENS),
    "two dimensions": (3, TOKENS),
    "longer": (2, 1, 3, TOKENS + 9),
}


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_masks(shape, causal):
    attention_inputs, query = make_payload(), torch.randn(2, 4, 3, 64)
    visible = torch.rand(shape) < 0.6
    visible[..., 0] = True
    bias = torch.randn(shape)
    check(query, attention_inputs, visible, causal=causal)
    check(query, attention_inputs, bias, causal=causal)
    for dtype in TOLERANCES:
        hidden = torch.zeros(shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
        check(query, attention_inputs, hidden, causal=causal)
    check(query, attention_inputs, bias.masked_fill(~visible, -torch.inf), causal=causal)


@pytest.mark.parametrize("scaling", [None, 0.05, 1.0])
@pytest.mark.parametrize("softcap", [None, 0.5, 20.0])
@pytest.mark.parametrize("sinks", [None, [-1.0, 0.0, 2.0, 9.0]])
def test_options(scaling, softcap, sinks):
    query, mask = torch.randn(2, 4, 3, 64), torch.rand(2, 1, 3, TOKENS) < 0.6
    check(query, make_payload(), mask, scaling=scaling, softcap=softcap, sinks=None if sinks is None else torch.tensor(sinks))


@pytest.mark.parametrize("low", [False, -torch.inf, torch.finfo(torch.float32).min])
def test_a_row_that_sees_nothing_is_finite_and_spoils_no_other(low):
    attention_inputs, query = make_payload(), torch.randn(2, 4, 3, 64)
    mask = torch.full((2, 1, 3, TOKENS), 0.0 if low else True)
    mask[0, :, 1] = low
    out = attend(query, attention_inputs, mask)
    assert out.isfinite().all()
    rest = torch.ones(2, 3, dtype=torch.bool)
    rest[0, 1] = False
    assert torch.equal(out.transpose(1, 2)[rest], attend(query, attention_inputs).transpose(1, 2)[rest])
    with_sinks = attend(query, attention_inputs, mask, sinks=torch.zeros(4))
    assert not with_sinks[0, :, 1].any()  # all of it went to the sink
    assert with_sinks.isfinite().all()


def test_inputs_are_left_alone():
    attention_inputs, query, mask = make_payload("int8_asymmetric"), torch.randn(2, 4, 3, 64), torch.randn(2, 1, 3, TOKENS)
    segments = attention_inputs.key.segments + attention_inputs.value.segments
    held = [t for s in segments for t in ([s.x] if isinstance(s, Exact) else s.codes.values())]
    before = [t.clone() for t in (query, mask, *held)]
    attend(query, attention_inputs, mask, softcap=3.0, sinks=torch.zeros(4), causal=True)
    assert all(map(torch.equal, before, (query, mask, *held)))
