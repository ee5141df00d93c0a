"""A handle answers as the tensor that it stands for, lazily where attention code needs it to."""

import contextlib
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

from qkvcache.attention import CompressedKV, compressed_kv
from qkvcache.layers.compressed import CompressedLayer
from tests.matrix import FORMATS
from tests.reference import assert_close, count_decoded_layers
from tests.seeds import SEED
from tests.tolerance import rounding

B, H, T, D = 2, 3, 40, 32
SLOW = "attention code calls .* on compressed keys or values"


def new_handles() -> tuple[CompressedKV, CompressedKV]:
    layer = CompressedLayer(FORMATS["turboquant_4bit_nc"], 2, 4)
    layer.update(torch.randn(B, H, T - 3, D), torch.randn(B, H, T - 3, D))
    return layer.update(torch.randn(B, H, 3, D), torch.randn(B, H, 3, D))


handles = pytest.fixture(new_handles, name="handles")


@contextlib.contextmanager
def lazily():
    """Nothing is decoded, and nobody is warned."""
    with count_decoded_layers() as decoded, warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert not decoded


def assert_stands_for(got: CompressedKV, expected: torch.Tensor) -> None:
    with lazily():
        assert isinstance(got, CompressedKV)
        assert got.shape == expected.shape and isinstance(got.shape, torch.Size)
        assert got.size() == expected.size() and got.dim() == got.ndim == expected.dim()
        assert [got.size(i) for i in range(-1, got.ndim)] == [expected.size(i) for i in range(-1, got.ndim)]
        assert (got.dtype, got.device) == (expected.dtype, expected.device)
    assert torch.equal(got.dense(), expected)


LAZY = {
    "itself": lambda x: x,
    "contiguous": lambda x: x.contiguous(),
    "to device": lambda x: x.to(x.device),
    "to dtype": lambda x: x.to(x.dtype),
    "transpose": lambda x: x.transpose(2, 3),
    "transpose from the end": lambda x: x.transpose(-1, -2),
    "mT": lambda x: x.mT,
    "transpose twice": lambda x: x.transpose(2, 3).transpose(-2, -1),
    "a dimension more": lambda x: x[:, :, None],
    "a dimension more, all named": lambda x: x[:, :, None, :, :],
    "grouped": lambda x: x[:, :, None, :, :].expand(B, H, 2, T, D),
    "repeat_kv": lambda x: repeat_kv(x, 2),
    "repeat_kv once": lambda x: repeat_kv(x, 1),
    "repeat_kv in tuples": lambda x: x[:, :, None].expand((B, H, 2, T, D)).reshape((B, H * 2, T, D)),
    "repeat_kv transposed": lambda x: repeat_kv(x, 2).transpose(2, 3),
    "heads one after another": lambda x: x.repeat(1, 2, 1, 1),
    "flat": lambda x: x.reshape(B * H, T, D),
    "flat transposed": lambda x: repeat_kv(x, 2).view(B * H * 2, -1, D).transpose(1, 2),
    "flat and plain": lambda x: x.reshape(B * H, T, D).reshape(B, H, T, D),
    "reshape to -1": lambda x: x[:, :, None].expand(B, H, 2, T, D).reshape(B, -1, T, D),
    "in fp32": lambda x: x.float(),
    "in fp32 and flat": lambda x: x.float().reshape(B * H, -1, D),
}


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("view", LAZY.values(), ids=LAZY)
def test_views_that_stay_lazy(handles, view, side):
    expected = view(handles[side].dense())
    with lazily():
        got = view(handles[side])
    assert_stands_for(got, expected)


VIEWS = {
    "tokens": lambda x: x[:, :, 3:7],
    "one": lambda x: x[0],
    "ellipsis": lambda x: x[..., :5],
    "tensor index": lambda x: x[torch.tensor([1, 0])],
    "tensor index of tokens": lambda x: x[:, :, torch.tensor([1, 0])],
    "heads repeated by index": lambda x: repeat_kv(x, 2)[:, :, None],
    "expand otherwise": lambda x: x[:, :, None].expand(-1, -1, 2, -1, -1),
    "expand to more rows": lambda x: x[:1].expand(4, H, T, D),
    "reshape to other heads": lambda x: x.reshape(B, H * T, D),
    "repeat of tokens": lambda x: x.repeat(1, 1, 2, 1),
    "transpose otherwise": lambda x: x.transpose(1, 2),
    "transpose grouped": lambda x: x[:, :, None].transpose(2, 3),
    "to another dtype": lambda x: x.to(torch.float64),
    "to dtype by keyword": lambda x: x.to(dtype=torch.float16),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_other_views_are_dense(handles, view):
    got = view(handles[0])
    assert isinstance(got, torch.Tensor) and torch.equal(got, view(handles[0].dense()))


OTHERS = {
    "method": lambda x: x.permute(1, 0, 3, 2),
    "method of a view": lambda x: repeat_kv(x, 2).transpose(2, 3).sum(1),
    "attribute": lambda x: x.data,
    "function": lambda x: torch.cat([x, torch.ones(B, H, 1, D)], dim=2),
    "functional": lambda x: F.pad(x, (0, 1)),
    "einsum": lambda x: torch.einsum("bhtd,bhsd->bhts", torch.ones(B, H, 1, D), x),
    "matmul from the left": lambda x: x @ torch.ones(D, 2),
    "matmul of other shapes": lambda x: torch.ones(5, D) @ x.mT,
    "bmm of values for keys": lambda x: torch.bmm(torch.ones(B * H, 1, D), x.reshape(B * H, T, D).mT),
    "baddbmm of other operands": lambda x: torch.baddbmm(torch.ones(B * H, T, T), torch.ones(B * H, T, D), x.reshape(B * H, T, D).mT),
    "times a tensor": lambda x: torch.full((D,), 2.0) * x,
    "times a number": lambda x: x * 2 + 3 * x,
    "arithmetic": lambda x: -x / 2 - (1 - x),
}


@pytest.mark.filterwarnings(f"ignore:{SLOW}")
@pytest.mark.parametrize("use", OTHERS.values(), ids=OTHERS)
def test_any_other_use_is_dense_and_right(handles, use):
    got = use(handles[1])
    assert isinstance(got, torch.Tensor)
    torch.testing.assert_close(got, use(handles[1].dense()))


@pytest.mark.parametrize("use", ["method", "function", "matmul of other shapes", "times a number", "arithmetic"])
def test_slow_use_is_told_once(handles, use, recwarn):
    compressed_kv.warn_once.cache_clear()
    for _ in range(3):
        OTHERS[use](handles[0])
    told = [str(warning.message) for warning in recwarn]
    assert told and all(re.match(SLOW, text) for text in told) and len(set(told)) == len(told)


def test_what_tensors_lack_handles_lack(handles):
    with pytest.raises(AttributeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handles[0].no_such_method  # noqa: B018
    assert not hasattr(handles[0], "__array__")


# Attention


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("matmul", [torch.matmul, torch.Tensor.matmul, lambda a, b: a @ b], ids=["function", "method", "operator"])
def test_the_matmuls_of_eager_attention(handles, matmul, queries, repeats):
    query, weights = torch.randn(B, H * repeats, queries, D), torch.rand(B, H * repeats, queries, T)
    key, value = (repeat_kv(handle, repeats) for handle in handles)
    with lazily():
        scores, out = matmul(query, key.transpose(2, 3)), matmul(weights, value)
    assert_close(scores, query @ key.dense().mT, rounding(D, T))
    assert_close(out, weights @ value.dense(), rounding(D, T))


@pytest.mark.parametrize("repeats", [1, 2])
def test_the_matmuls_of_flat_heads(handles, repeats):
    """BLOOM, XGLM and others flatten rows and heads."""
    heads = B * H * repeats
    query, weights, bias = torch.randn(heads, 3, D), torch.rand(heads, 3, T), torch.randn(heads, 1, T)
    key, value = (repeat_kv(handle, repeats).reshape(heads, -1, D) for handle in handles)
    with lazily():
        scores, out = torch.bmm(query, key.transpose(1, 2)), torch.bmm(weights, value)
        biased = bias.baddbmm(batch1=query, batch2=key.mT, beta=0.5, alpha=2.0)
    assert_close(scores, query @ key.dense().mT, rounding(D, T))
    assert_close(out, weights @ value.dense(), rounding(D, T))
    assert_close(biased, 0.5 * bias + 2 * query @ key.dense().mT, rounding(D, T))


@pytest.mark.filterwarnings(f"ignore:{SLOW}")
def test_crossed_matmuls_are_right_too(handles):
    """Keys in the place of values, and the other way round."""
    key, value = handles
    query, weights = torch.randn(B, H, 2, D), torch.rand(B, H, 2, T)
    assert_close(query @ value.mT, query @ value.dense().mT, rounding(D, T))
    assert_close(weights @ key, weights @ key.dense(), rounding(D, T))


SDPA = {
    "plain": {},
    "scale": {"scale": 0.3},
    "bool mask": {"attn_mask": (torch.arange(T) % 3 > 0).expand(2, T)},
    "mask of rows": {"attn_mask": (torch.arange(T) % 3 > 0).expand(B, 1, 2, T)},
    "additive mask": {"attn_mask": torch.linspace(-3, 3, T).expand(1, 1, 2, T)},
}


@pytest.mark.parametrize("options", SDPA.values(), ids=SDPA)
def test_sdpa(handles, options):
    query = torch.randn(B, H, 2, D)
    expected = F.scaled_dot_product_attention(query, *(handle.dense() for handle in handles), **options)
    with lazily():
        got = F.scaled_dot_product_attention(query, *handles, **options)
    assert_close(got, expected, rounding(D, T))


def test_sdpa_of_grouped_queries(handles):
    query = torch.randn(B, H * 2, 2, D)
    expected = F.scaled_dot_product_attention(query, *(handle.dense() for handle in handles), enable_gqa=True)
    with lazily():
        got = F.scaled_dot_product_attention(query, *handles, enable_gqa=True)
        repeated = F.scaled_dot_product_attention(query, *(repeat_kv(handle, 2) for handle in handles))
    assert_close(got, expected, rounding(D, T))
    assert torch.equal(got, repeated)


@pytest.mark.filterwarnings(f"ignore:{SLOW}")
@pytest.mark.parametrize("queries", [1, 3])
def test_sdpa_is_causal_means_what_torch_means(handles, queries):
    """From the upper left, one query too."""
    query, dense = torch.randn(B, H, queries, D), tuple(handle.dense() for handle in handles)
    got = F.scaled_dot_product_attention(query, *handles, is_causal=True)
    assert_close(got, F.scaled_dot_product_attention(query, *dense, is_causal=True), rounding(D, T))


@pytest.mark.filterwarnings(f"ignore:{SLOW}")
def test_sdpa_dropout_is_torchs(handles):
    query, dense = torch.randn(B, H, 1, D), tuple(handle.dense() for handle in handles)
    out = []
    for kv in (handles, dense):
        torch.manual_seed(SEED + 1)
        out.append(F.scaled_dot_product_attention(query, *kv, dropout_p=0.5))
    assert torch.equal(*out)


PAIRS = {
    "swapped": lambda key, value, other: (value, key),
    "twice the keys": lambda key, value, other: (key, key),
    "values of another layer": lambda key, value, other: (key, other[1]),
    "keys of another layer": lambda key, value, other: (other[0], value),
    "values of a tensor": lambda key, value, other: (key, dense(value)),
    "keys of a tensor": lambda key, value, other: (dense(key), value),
}


def dense(x: CompressedKV | torch.Tensor) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else x.dense()


@pytest.mark.filterwarnings(f"ignore:{SLOW}")
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_sdpa_of_handles_that_no_update_returned_together(handles, pair):
    query, given = torch.randn(B, H, 2, D), pair(*handles, new_handles())
    expected = F.scaled_dot_product_attention(query, *map(dense, given))
    assert_close(F.scaled_dot_product_attention(query, *given), expected, rounding(D, T))


def test_attributes_are_none_of_a_tensor():
    """Attention code that calls a method of tensors gets it, not an attribute of the handle."""
    own = {name for name in CompressedKV.__slots__ if hasattr(torch.Tensor, name)}
    assert not own


MASKS = {
    "none": lambda queries: None,  # of one query: for more, transformers always makes one
    "bool": lambda queries: torch.ones(B, 1, queries, T, dtype=torch.bool).tril(T - queries),
    "additive": lambda queries: torch.zeros(B, 1, queries, T).masked_fill(torch.arange(T) < 2, torch.finfo(torch.float32).min),
    "each head": lambda queries: torch.rand(B, 2 * H, queries, T) < 0.7,
}


@pytest.mark.parametrize(("queries", "mask"), [(1, "none"), *((q, mask) for q in (1, 3) for mask in MASKS if mask != "none")])
@pytest.mark.parametrize("function", [sdpa_attention_forward, eager_attention_forward])
def test_transformers_own_functions(handles, function, queries, mask):
    mask = MASKS[mask](queries)
    if function is eager_attention_forward and mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True, training=False)
    query = torch.randn(B, 2 * H, queries, D)
    dense = tuple(handle.dense() for handle in handles)
    expected, weights = function(module, query, *dense, mask, scaling=0.2)
    with lazily():
        got, our_weights = function(module, query, *handles, mask, scaling=0.2)
    assert_close(got, expected, rounding(D, T))
    if weights is not None:
        assert_close(our_weights, weights, rounding(D, T))


def test_half_precision_stays_so(handles):
    key, value = handles
    query = torch.randn(B, H, 2, D).bfloat16()
    assert (query @ key.mT).dtype == F.scaled_dot_product_attention(query, key, value).dtype == torch.bfloat16
