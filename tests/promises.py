"""The promises of a format and of a policy, for tests: of those of the library, and of one's own (docs/extending).

check_format(MyFormat())
check_policy(MyPolicy(budget=32))
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from qkvcache.caches import CompressedCache
from qkvcache.formats import Codec, Codes, Format
from qkvcache.releases import passing

if TYPE_CHECKING:
    from qkvcache.policies import Policy, Tokens

Check = Callable[[Format, int], None]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_format(format: Format, head_dims: Sequence[int] = (64, 128), max_error: float = 1.0) -> None:
    """Raises AssertionError for the first promise of a `qkvcache.formats.Format` that `format` breaks; the message names it.

    Args:
        format: an instance of the format.
        head_dims: head_dims that the format must hold.
        max_error: the largest allowed error on normal data: RMS of the difference over RMS of the data.
    """
    for head_dim in head_dims:
        _require(not (reason := format.refuses(head_dim)), f"head_dim {head_dim} is refused: {reason}; pass the head_dims that it holds")
        for check in FORMAT_CHECKS:
            check(format, head_dim)
        for side, codec in _sides(format):
            error = rms_error(codec, _normal(1, 4, 128, head_dim))
            _require(error <= max_error, f"{side} on normal data have an error of {error:.3g} of their size, above {max_error:.3g}")


def encode(codec: Codec, x: Tensor) -> Codes:
    """All buffers of one block `[B, H, T, D]`, those kept once among them."""
    statistics = codec.calibrate(x)
    return codec.quantize(x, statistics) | statistics


def roundtrip(codec: Codec, x: Tensor) -> Tensor:
    """`x` `[B, H, T, D]`, quantized and dequantized."""
    return codec.dequantize(encode(codec, x), x.shape[-1])


def rms_error(codec: Codec, x: Tensor) -> float:
    """RMS of the difference that quantizing makes, over RMS of `x`."""
    return ((roundtrip(codec, x) - x).norm() / x.norm()).item()


def copies_are_equal(format: Format, head_dim: int) -> None:
    for what, x in (*_sides(format), ("format", format)):
        same = x == (other := copy.deepcopy(x)) and hash(x) == hash(other)
        _require(same, f"{what}: a copy of {type(x).__name__} differs from it: decorate the class with @dataclass(frozen=True)")


def returns_what_is_declared(format: Format, head_dim: int) -> None:
    for side, codec in _sides(format):
        for dtype in DTYPES:
            codes = encode(codec, _normal(2, 3, 5, head_dim).to(dtype))
            declared = {
                b.name: (b.dtype or dtype, (2, 3 if b.heads == "each" else 1, 5 if b.tokens == "each" else 1, b.width))
                for b in codec.buffers(head_dim)
            }
            found = {name: (x.dtype, tuple(x.shape)) for name, x in codes.items()}
            _require(found == declared, f"{side}: quantize and calibrate return {found}, and buffers declares {declared}")
            levels, scale, offset, center = codec.unpack(codes, head_dim)
            for name, part, shape in (("levels", levels, [2, 3, 5, head_dim]), ("center", center, [2, 3, 1, head_dim])):
                kinds = (torch.float32, torch.int8) if name == "levels" and scale is not None else (torch.float32,)
                fits = part is None or part.dtype in kinds and list(part.shape) == shape
                _require(fits, f"{side}: the {name} of unpack must be float32 {shape}, got {_described(part)}")
            for name, part in (("scale", scale), ("offset", offset)):
                fits = part is None or part.dtype == torch.float32 and not head_dim % part.shape[-1]
                _require(
                    fits, f"{side}: the {name} of unpack must be float32, for equal shares of {head_dim} channels, got {_described(part)}"
                )


def counts_its_bytes(format: Format, head_dim: int) -> None:
    x = _normal(1, 3, 7, head_dim).bfloat16()
    held = sum(t.nbytes for _, codec in _sides(format) for t in codec.quantize(x, codec.calibrate(x)).values())
    counted = 7 * format.bytes_per_token(head_dim, kv_heads=3)
    _require(held == counted, f"7 tokens of 3 heads take {held} bytes, and bytes_per_token counts {counted}")


def tokens_stand_alone(format: Format, head_dim: int) -> None:
    for side, codec in _sides(format):
        for dtype in DTYPES:
            x = _normal(1, 3, 6, head_dim).to(dtype)
            statistics = codec.calibrate(x)
            single = [codec.quantize(x[:, :, t : t + 1], statistics) for t in range(6)]
            joined = {name: torch.cat([codes[name] for codes in single], dim=2) for name in single[0]}
            _same(joined, codec.quantize(x, statistics), f"{side}: the codes of a token depend on the tokens that are quantized with it")


def rows_stand_alone(format: Format, head_dim: int) -> None:
    x = _normal(3, 2, 9, head_dim) * torch.tensor([1.0, 100.0, 0.01])[:, None, None, None]
    for side, codec in _sides(format):
        together = encode(codec, x)
        for row in range(3):
            alone = encode(codec, x[row : row + 1])
            _same({name: t[row : row + 1] for name, t in together.items()}, alone, f"{side}: the codes of a row depend on other rows")


def takes_every_dtype(format: Format, head_dim: int) -> None:
    for side, codec in _sides(format):
        own = {b.name for b in codec.buffers(head_dim) if b.dtype is None}  # in the dtype of the model
        for dtype in DTYPES[1:]:
            x = _normal(2, 2, 9, head_dim).to(dtype)
            codes, exact = ({name: t for name, t in encode(codec, y).items() if name not in own} for y in (x, x.float()))
            _same(codes, exact, f"{side}: {dtype} has other codes than the same numbers in float32")
            decoded = codec.dequantize(encode(codec, x), head_dim, dtype)
            _require(torch.equal(decoded, roundtrip(codec, x.float()).to(dtype)), f"{side}: dequantized to {dtype}, numbers differ")


def leaves_its_input_alone(format: Format, head_dim: int) -> None:
    view = _normal(2, 9, 3, 2 * head_dim).transpose(1, 2)[..., ::2]
    before = view.clone()
    for side, codec in _sides(format):
        codes = encode(codec, view)
        _require(torch.equal(view, before), f"{side}: quantize changes its input")
        _same(codes, encode(codec, view.contiguous()), f"{side}: codes depend on the strides of the input")


def codes_can_be_moved(format: Format, head_dim: int) -> None:
    """Caches gather, join, slice and repeat the codes of tokens and rows."""
    x, order = _normal(2, 3, 9, head_dim), torch.tensor([8, 0, 3])
    moves: dict[str, Callable[[Tensor], Tensor]] = {
        "gathered": lambda t: t.gather(2, order[:, None].expand(*t.shape[:2], 3, t.shape[3])),
        "sliced": lambda t: t[:, :, 3:8],
        "joined": lambda t: torch.cat([t[:, :, 5:], t[:, :, :5]], 2),
    }
    for side, codec in _sides(format):
        codes = encode(codec, x)
        once = {b.name for b in codec.buffers(head_dim) if b.tokens == "once"}
        decoded = codec.dequantize(codes, head_dim)
        for how, move in moves.items():
            moved = codec.dequantize({name: t if name in once else move(t) for name, t in codes.items()}, head_dim)
            _near(moved, move(decoded), codec, f"{side}: tokens whose codes were {how} dequantize to other numbers")
        rows = codec.dequantize({name: t[[1, 0, 1]] for name, t in codes.items()}, head_dim)
        _near(rows, decoded[[1, 0, 1]], codec, f"{side}: rows whose codes were reordered dequantize to other numbers")


def attention_reads_what_is_unpacked(format: Format, head_dim: int) -> None:
    """Attention rotates the query and applies scale, offset and center to scores."""
    query = _normal(1, 2, 4, head_dim)
    for side, codec in _sides(format):
        codes = encode(codec, _normal(1, 2, 9, head_dim))
        levels, scale, offset, center = codec.unpack(codes, head_dim)
        stored = levels.unflatten(-1, (1 if scale is None else scale.shape[-1], -1))
        stored = (stored if scale is None else stored * scale.unsqueeze(-1)).flatten(-2)
        for added in (offset, center):
            stored = stored if added is None else stored + added
        scores, wanted = codec.rotate(query) @ stored.mT, query @ codec.dequantize(codes, head_dim).mT
        _require(
            bool((scores - wanted).abs().max() <= 1e-5 * wanted.abs().max()),
            f"{side}: rotate(query) times what unpack returns differs from query times dequantize: rotation must be orthonormal",
        )


def zeros_stay_zeros(format: Format, head_dim: int) -> None:
    for side, codec in _sides(format):
        for tokens in (1, 5):
            x = torch.zeros(1, 2, tokens, head_dim)
            _require(torch.equal(roundtrip(codec, x), x), f"{side}: zeros do not dequantize to zeros")


def numbers_that_are_not_finite_spoil_nothing_else(format: Format, head_dim: int) -> None:
    clean = _normal(2, 3, 9, head_dim)
    for side, codec in _sides(format):
        statistics = codec.calibrate(clean)
        before = codec.dequantize(codec.quantize(clean, statistics) | statistics, head_dim)
        shared = any(b.heads == "shared" and b.tokens == "each" for b in codec.buffers(head_dim))
        for bad in (torch.nan, torch.inf, -torch.inf):
            x = clean.clone()
            x[1, 2, 4, 7] = bad
            after = codec.dequantize(codec.quantize(x, statistics) | statistics, head_dim)
            _require(not after[1, 2, 4, 7].isfinite(), f"{side}: {bad} dequantizes to the finite number {after[1, 2, 4, 7]}")
            spoiled = torch.zeros(2, 3, 9, dtype=torch.bool)
            spoiled[1, :, 4] = shared
            spoiled[1, 2, 4] = True
            _require(torch.equal(after[~spoiled], before[~spoiled]), f"{side}: {bad} in one token changes others")


def holds_what_it_does_not_refuse(format: Format, head_dim: int) -> None:
    for dim in (1, 8, 16, 20, 33, 40, 48, 68, 72, 80, 100, 112, 256, 576):
        for side, codec in _sides(format):
            if codec.refuses(dim):
                continue
            try:
                held = roundtrip(codec, x := _normal(1, 2, 3, dim)).shape == x.shape
            except Exception as error:
                raise AssertionError(f"{side}: head_dim {dim} is not refused, and raises {type(error).__name__}: {error}") from error
            _require(held, f"{side}: head_dim {dim} is not refused, and does not come back in its shape")


def a_cache_holds_it(format: Format, head_dim: int) -> None:
    """A cache that grows and a preallocated one, filled in pieces, hold the same tokens, and exact zones as they came."""
    x = _normal(2, 2, 2, 60, head_dim).unbind()

    def held(*sizes: int, max_length: int | None = None) -> list[Tensor]:
        cache = CompressedCache(format=format, num_sink_tokens=2, residual_length=3, max_length=max_length)
        for keys, values in zip(*(side.split(sizes, dim=2) for side in x), strict=True):
            cache.update(keys, values, 0)
        return [side[:, :, :60] for side in cache.layers[0].dense()]  # type: ignore[union-attr]

    whole = held(20, 40)
    for (side, _), kept, exact in zip(_sides(format), whole, x, strict=True):
        zones = torch.equal(kept[:, :, :2], exact[:, :, :2]) and torch.equal(kept[:, :, -3:], exact[:, :, -3:])
        _require(zones, f"{side}: a cache does not hold its exact zones as they came")
    for how, found in (("in pieces", held(20, 1, 1, 38)), ("in preallocated storage", held(20, 40, max_length=70))):
        for (side, codec), ours, theirs in zip(_sides(format), found, whole, strict=True):
            _near(ours, theirs, codec, f"{side}: a cache that is filled {how} holds other numbers")


FORMAT_CHECKS: tuple[Check, ...] = (
    copies_are_equal,
    leaves_its_input_alone,
    returns_what_is_declared,
    counts_its_bytes,
    tokens_stand_alone,
    rows_stand_alone,
    takes_every_dtype,
    codes_can_be_moved,
    attention_reads_what_is_unpacked,
    zeros_stay_zeros,
    numbers_that_are_not_finite_spoil_nothing_else,
    holds_what_it_does_not_refuse,
    a_cache_holds_it,
)
"""The promises of a format, each a function of the format and a head_dim."""


def check_policy(policy: Policy) -> None:
    """Raises AssertionError for the first promise of a `qkvcache.policies.Policy` that `policy` breaks; the message names it.

    A tiny random model reads texts of about twice the budget, in pieces and token by token.

    Args:
        policy: an instance of the policy. Pass a small budget, of 24 to 128 tokens.

    Raises ValueError for budgets by layer, and for one outside of these limits.
    """
    if len(policy.budgets) != 1 or not 24 <= (size := int(policy.size(policy.budgets[0], 96))) <= 128:
        raise ValueError(f"budget={policy.budget!r}: pass one budget for all layers, of 24 to 128 tokens")
    reader = _Reader(policy, size + 30)
    first, second, padded = slice(0, 1), slice(1, 2), reader.read(padding=7)
    whole = reader.read()
    for part, alone, depends in (
        (whole, reader.read(), "on more than its arguments: a second reading keeps other tokens"),
        (_of_row(0, whole), reader.read(rows=first), "on other rows"),
        (_of_row(1, whole), reader.read(rows=second), "on other rows"),
        (_of_row(0, padded), _of_row(0, whole), "on the padding of other rows"),
        (_of_row(1, padded), reader.read(rows=second, begin=7), "on the padding before it"),
    ):
        _require(part == alone, f"what is kept of a row depends {depends}")
    if policy.alpha_safeguard is None and not policy.shares_layers:
        heads, other = ([step[0][0][0] for step in found] for found in (whole, reader.read(other_head=True)))
        _require(heads == other, "what a head keeps depends on other heads")


Kept = list[list[list[set[int]]]]
"""The positions of the tokens that a cache keeps, by row, layer and head."""


def _of_row(row: int, steps: list[Kept]) -> list[Kept]:
    return [[step[row]] for step in steps]


class _Reader:
    """Reads a text of two rows with a tiny model, and checks the budget, the protected tokens and the priorities at each step."""

    def __init__(self, policy: Policy, length: int):
        self.policy = _watched(policy)
        self.sizes = [length, 9, *[1] * 8]
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.stack([torch.randperm(256, generator=generator)[: sum(self.sizes)] for _ in (0, 1)])  # each once: no equal scores
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            initializer_range=0.3,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = LlamaForCausalLM(config).eval()

    @torch.no_grad()
    def read(self, rows: slice = slice(None), begin: int = 0, padding: int = 0, other_head: bool = False) -> list[Kept]:
        """Returns what a policy keeps after each step. `begin`: the first token; `padding`: tokens of the second row that padding replaces;
        `other_head`: the second KV head of the first layer has other weights."""
        model = self.model
        if other_head:
            model = copy.deepcopy(model)
            attention = model.model.layers[0].self_attn
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                half = projection.weight[projection.weight.shape[0] // 2 :]
                half *= torch.linspace(-1, 2, len(half))[:, None]
        ids = self.ids[rows, begin:]
        mask = torch.ones_like(ids)
        mask[1:, :padding] = 0
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        cache, end, found = CompressedCache(model.config, policy=self.policy), 0, []
        for number, size in enumerate([self.sizes[0] - begin, *self.sizes[1:]]):
            step, end = slice(end, end + size), end + size
            if self.policy.second_reading and not number:
                cache.compress(model, ids[:, step], attention_mask=mask[:, :end], progress=False)
            else:
                model(ids[:, step], attention_mask=mask[:, :end], position_ids=positions[:, step], **passing(cache))
            found.append(self._kept(cache, mask[:, :end].sum(-1).tolist()))
        return found

    def _kept(self, cache: CompressedCache, seen: list[int]) -> Kept:
        policy, budget, layers = self.policy, self.policy.budgets[0], range(len(cache.layers))
        positions = [cache.kept_positions(layer).tolist() for layer in layers]
        kept = [[[{p for p in head if p >= 0} for head in positions[layer][row]] for layer in layers] for row in range(len(seen))]
        for row, count in zip(kept, seen, strict=True):
            limit = int(policy.size(budget, count))
            common = sum(row, []) if policy.shares_layers else None
            for groups in [common] if common else row if policy.differs_by_head else [[head] for layer in row for head in layer]:
                held = sum(map(len, groups))
                _require(held <= len(groups) * limit, f"{held} tokens are kept in {len(groups)} heads with a budget of {limit}")
        return kept


def _watched(policy: Policy) -> Policy:
    """`policy`, with checks of what `priority` returns."""

    class Watched(type(policy)):  # type: ignore[misc]
        def priority(self, tokens: Tokens) -> Tensor:
            before = copy.deepcopy({field: x for field, x in vars(tokens).items() if isinstance(x, Tensor)})
            found = super().priority(tokens)
            shape = list(tokens.positions.shape)
            _require(isinstance(found, Tensor) and list(found.shape) == shape, f"priority returns {_described(found)}, expected {shape}")
            _require(all(torch.equal(getattr(tokens, field), x) for field, x in before.items()), "priority changes its arguments")
            order = torch.arange(shape[2]).flip(0)
            turned: dict[str, Any] = {field: x.flip(2) for field, x in before.items() if field != "seen"}
            again = super().priority(dataclasses.replace(tokens, **turned))[:, :, order]
            near = torch.isclose(found.float(), again.float(), rtol=1e-3, atol=1e-5, equal_nan=True) | ~tokens.valid
            _require(bool(near.all()), "priorities depend on the order of slots: use tokens.positions")
            return found

    Watched.__name__ = type(policy).__name__
    return Watched(**{field.name: getattr(policy, field.name) for field in dataclasses.fields(policy) if field.init})


def _described(x: object) -> str:
    return f"{x.dtype} {list(x.shape)}".removeprefix("torch.") if isinstance(x, Tensor) else type(x).__name__


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _sides(format: Format) -> tuple[tuple[str, Codec], tuple[str, Codec]]:
    return ("keys", format.key), ("values", format.value)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _same(a: Codes, b: Codes, message: str) -> None:
    for name in a.keys() | b.keys():
        _require(name in a and name in b and torch.equal(a[name], b[name]), f"{message} (buffer {name!r})")


def _near(a: Tensor, b: Tensor, codec: Codec, message: str) -> None:
    """Equal, or where vectors are rotated, equal but for the rounding of that sum."""
    slack = 0.0 if codec.rotation is None else 1e-6 * torch.linalg.vector_norm(b, dim=-1, keepdim=True)
    _require(a.shape == b.shape and bool(((a - b).abs() <= slack).all()), message)
