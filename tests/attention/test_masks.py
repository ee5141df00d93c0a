"""`visible`: the masks of every implementation, against loops over queries and keys."""

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from qkvcache.attention.masks import NewTokens, joined, joined_by_head, new_tokens, padding_columns, visible
from qkvcache.kernels import AttentionInputs, Exact, KeysOrValues, attend, attend_pages
from tests.kernels.paged_inputs import of_heads
from tests.matrix import FORMATS, covering
from tests.reference import assert_close
from tests.tolerance import TURNED, rounding

B, H, Q, T = 2, 3, 4, 12
PADDING = (0, 5)
CPU = torch.device("cpu")


def expected(sees) -> torch.Tensor:
    """`[B, Q, T]` from `sees(row, query position, key position)`."""
    out = torch.zeros(B, Q, T, dtype=torch.bool)
    for b, q, t in itertools.product(range(B), range(Q), range(T)):
        out[b, q, t] = sees(b, T - Q + q, t)
    return out


def resolved(implementation: str, mask, **options) -> torch.Tensor:
    """`[B, Q, T]` of what `attend` makes visible with what `visible` returns."""
    mask, causal = visible(implementation, mask, B, Q, T, CPU, options)
    one_hot = torch.eye(T).expand(B, 1, T, T)
    attention_inputs = AttentionInputs(
        *(KeysOrValues.of((Exact(x),), tuple(x.shape), x.dtype, x.device) for x in (torch.zeros(B, 1, T, 1), one_hot))
    )
    weights = attend(torch.zeros(B, 1, Q, 1), attention_inputs, mask, causal=causal)[:, 0]
    return weights > 1 / (2 * T)


def padding_mask(tokens: int = T) -> torch.Tensor:
    return torch.stack([torch.arange(tokens) >= p + tokens - T for p in PADDING]).long()


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention", "qkvcache"])
@pytest.mark.parametrize("is_causal", [None, True, False])
def test_no_mask_means_causal_from_the_absolute_offset(implementation, is_causal):
    sees = expected(lambda b, q, t: is_causal is False or t <= q)
    assert torch.equal(resolved(implementation, None, is_causal=is_causal), sees)


@pytest.mark.parametrize("is_causal", [None, True, False])
def test_a_finished_mask_is_all_there_is(is_causal):
    mask = torch.rand(B, 1, Q, T) < 0.5
    mask[..., 0] = True
    assert torch.equal(resolved("sdpa", mask, is_causal=is_causal), mask[:, 0])
    additive = torch.zeros(B, 1, Q, T).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert torch.equal(resolved("sdpa", additive, is_causal=is_causal), mask[:, 0])
    assert visible("sdpa", mask, B, Q, T, CPU, {}) == (mask, False)


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn"])
@pytest.mark.parametrize("longer", [0, 7])
@pytest.mark.parametrize("window", [None, 3, T, 100])
@pytest.mark.parametrize("is_causal", [None, True, False])
def test_flash(name, is_causal, window, longer):
    def sees(b, q, t, padding=(0, 0)):
        return t >= padding[b] and (is_causal is False or t <= q) and (window is None or q - t < window)

    options = {"is_causal": is_causal, "sliding_window": window}
    padded = expected(functools.partial(sees, padding=PADDING))
    assert torch.equal(resolved(name, padding_mask(T + longer), **options), padded)
    assert torch.equal(resolved(name, padding_mask().bool(), **options), padded)
    assert torch.equal(resolved(name, None, **options), expected(sees))


def test_a_window_is_for_flash_only():
    """The others have it in their mask; without one there is none."""
    assert torch.equal(resolved("sdpa", None, sliding_window=3), expected(lambda b, q, t: t <= q))


def test_flex():
    def sees(b, q, t):
        return (t <= q) & (t >= torch.tensor(PADDING)[b]) & (q - t < 7)

    block_mask = create_block_mask(lambda b, h, q, t: sees(b, q + T - Q, t), B, None, Q, T, device="cpu")
    got = resolved("flex_attention", block_mask)
    assert torch.equal(got, expected(lambda b, q, t: bool(sees(b, q, t))))


@pytest.mark.parametrize("kind", ["none", "bool", "additive", "flash"])
@pytest.mark.parametrize("batch", [1, B])
def test_position_bias_is_added(kind, batch):
    bias = torch.randn(batch, H, Q, T)
    mask = torch.rand(B, 1, Q, T) < 0.5
    mask[..., 0] = True
    hidden = torch.zeros(B, 1, Q, T).masked_fill(~mask, -torch.inf)
    given = {"none": None, "bool": mask, "additive": hidden, "flash": padding_mask()}[kind]
    got, causal = visible("flash_attention_2" if kind == "flash" else "sdpa", given, B, Q, T, CPU, {"position_bias": bias})
    if kind == "flash":
        hidden = torch.zeros(B, 1, 1, T).masked_fill(~padding_mask().bool()[:, None, None], -torch.inf)
    if kind == "none":
        hidden = torch.zeros(())
    assert causal == (kind in ("none", "flash"))
    assert_close(got.expand(B, H, Q, T).softmax(-1), (bias + hidden).expand(B, H, Q, T).softmax(-1), 1e-6)


@pytest.mark.parametrize(
    ("hidden", "end"),
    [([(0, 0), (0, 5)], 5), ([(0, 8), (0, 2)], 8), ([(0, 9), (8, 10)], 10), ([(3, 4), (0, 2)], 4)],
    ids=["usual", "all of a past", "new tokens", "within the past"],
)
@pytest.mark.parametrize("implementation", ["sdpa", "flash_attention_2"])
def test_the_end_of_padding(implementation, hidden, end):
    """Columns hidden from a row; of 12, the last four are of new tokens."""
    columns = torch.stack([(torch.arange(T) >= begin) & (torch.arange(T) < end) for begin, end in hidden])
    given = ~columns if "flash" in implementation else ~columns[:, None, None] & torch.ones(Q, T, dtype=torch.bool).tril(T - Q)
    fits, found, shown_from = padding_columns(None, given, *visible(implementation, given, B, Q, T, CPU, {}), Q, T)
    assert fits and torch.equal(found, columns) and shown_from == end


@pytest.mark.parametrize(("kind", "kernels"), covering(["padded", "any", "by_head", "additive"], ["torch", "triton"], strength=1))
def test_masks_of_new_tokens_over_pages_of_each_head(monkeypatch, kind, kernels):
    """The mask by a token's index in its head says what the one by columns does."""
    monkeypatch.setenv("QKVCACHE_KERNELS", kernels)
    held, hidden = of_heads(FORMATS["int8"], Q, dtype=torch.float32, device=CPU)
    is_valid = torch.tensor([[True, True, False, True], [False, False, True, True]])
    seen = torch.ones(Q, Q, dtype=torch.bool).tril() & is_valid[:, None, None]
    if kind in ("any", "by_head"):
        seen = torch.rand(2, 6 if kind == "by_head" else 1, Q, Q) < 0.5
    mask = torch.randn(1, 1, Q, Q).masked_fill(~seen, torch.finfo(torch.float32).min) if kind == "additive" else seen
    new, query = NewTokens(mask, is_valid, kind == "padded"), torch.randn(2, 6, Q, 64)
    out, _ = attend_pages(query, held.paged, joined_by_head(held.paged, new, query))
    wanted = attend(query, held, joined(~hidden, mask, query, held.key.shape[2]))
    counted = is_valid[:, None].expand(-1, 6, -1)
    limit = TURNED if kernels == "triton" else rounding(64, held.key.shape[2])
    assert_close(out[counted], wanted[counted], limit)


@torch.inference_mode()
@pytest.mark.parametrize("implementation", ["sdpa", "flash_attention_2"])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_mask_may_be_rewritten_between_steps(implementation, layers):
    """Without a version, as in inference mode: for a retry after `crop`, or for a second cache. Layers of a step share what was found."""
    given = torch.ones(1, T, dtype=torch.bool) if "flash" in implementation else torch.ones(1, 1, Q, T, dtype=torch.bool).tril(T - Q)
    for columns in ([3], [3, 10]):  # the step, and another with the same mask
        given[..., columns] = False
        found = []
        for layer in range(layers):
            module = SimpleNamespace(layer_idx=layer)
            padding = padding_columns(module, given, *visible(implementation, given, 1, Q, T, CPU, {}), Q, T)
            new = new_tokens(implementation, module, given, 1, Q, CPU)
            assert padding.columns[0].nonzero().flatten().tolist() == columns
            assert (new.is_valid is None) == (columns == [3])
            found.append(padding.columns)
        assert all(x is found[0] for x in found)
