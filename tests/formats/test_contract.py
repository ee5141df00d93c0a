"""What a format promises (`formats/base.py`), asked of every one."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from qkvcache import formats
from qkvcache.formats import REGISTRY, Codec, Format, Int8, resolve
from tests.formats.roundtrip import encode, error, roundtrip
from tests.matrix import COVER, FORMAT_ERRORS, FORMATS, slowly
from tests.reference import assert_close
from tests.tolerance import rounding, same_decoded

DIMS = [64, 80, 96, 112, 128, 192, 256]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FROM_THE_BLOCK = {"fp8_tensor"}  # one scale for what is encoded together

every_format = pytest.mark.parametrize("name", FORMATS)


def sides(name: str) -> tuple[Codec, ...]:
    return tuple(dict.fromkeys((FORMATS[name].key, FORMATS[name].value)))


def accepted(name: str) -> list[int]:
    """An int4 scale of 32 channels fits neither 80 nor 112; everything else fits everywhere."""
    return [dim for dim in DIMS if not (name in ("int4", "int4_group") and dim in (80, 112))]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@every_format
def test_encode_returns_what_is_declared(name):
    for codec, dtype, head_dim in itertools.product(sides(name), DTYPES, accepted(name)):
        codes = encode(codec, torch.randn(2, 3, 5, head_dim).to(dtype))
        declared = {
            b.name: (b.dtype or dtype, (2, 3 if b.heads == "each" else 1, 5 if b.tokens == "each" else 1, b.width))
            for b in codec.buffers(head_dim)
        }
        assert {name: (t.dtype, tuple(t.shape)) for name, t in codes.items()} == declared
        assert {b.role for b in codec.buffers(head_dim)} <= {"codes", "scales"}
        levels, scale, offset, center = codec.unpack(codes, head_dim)
        assert center is None or center.dtype == torch.float32 and center.shape == (2, 3, 1, head_dim)
        assert levels.dtype == torch.float32 and levels.shape == (2, 3, 5, head_dim)
        for factor in (scale, offset):
            assert factor is None or factor.dtype == torch.float32 and head_dim % factor.shape[-1] == 0


@every_format
def test_bytes_per_token_are_those_held(name):
    format = FORMATS[name]
    for head_dim in accepted(name):
        x = torch.randn(1, 3, 7, head_dim, dtype=torch.bfloat16)
        held = sum(t.nbytes for codec in (format.key, format.value) for t in codec.quantize(x, codec.calibrate(x)).values())
        assert held == 7 * format.bytes_per_token(head_dim, kv_heads=3), head_dim


@pytest.mark.parametrize(
    ("name", "at_64", "at_128"),
    [
        ("identity", 256, 512),
        ("int8", 136, 264),
        ("int8_asymmetric", 136, 264),
        ("fp8", 136, 264),
        ("fp8_tensor_frozen", 128, 256),
        ("int4", 72, 144),
        ("int4_vllm", 72, 136),
        ("nvfp4", 72, 144),
        ("turboquant_k8v4", 102, 198),
        ("turboquant_4bit_nc", 70, 134),
        ("turboquant_k3v4_nc", 62, 118),
        ("turboquant_3bit_nc", 54, 102),
    ],
)
def test_bytes(name, at_64, at_128):
    assert (FORMATS[name].bytes_per_token(64), FORMATS[name].bytes_per_token(128)) == (at_64, at_128)


@pytest.mark.parametrize("name", ["int8_token", "fp8_token", "fp8_tensor"])
def test_heads_share_the_bytes_of_a_scale(name):
    assert FORMATS[name].bytes_per_token(128, kv_heads=8) == 8 * 256 + 2 * 4


@every_format
def test_error_on_normal_data(name):
    x = torch.randn(1, 4, 128, 128)
    worst = max(error(codec, x) for codec in sides(name))
    assert worst <= FORMAT_ERRORS[FORMATS[name]]
    assert worst >= 0.8 * FORMAT_ERRORS[FORMATS[name]]  # a bound that stays close says something


@every_format
def test_error_at_every_head_dim(name):
    for head_dim in accepted(name):
        x = torch.randn(1, 2, 64, head_dim)
        assert max(error(codec, x) for codec in sides(name)) <= 1.2 * FORMAT_ERRORS[FORMATS[name]], head_dim


@pytest.mark.sums
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in FROM_THE_BLOCK])
@pytest.mark.parametrize("heads", slowly([1, 3], [3]))
def test_tokens_one_by_one_are_tokens_together(name, heads):
    for codec, dtype in itertools.product(sides(name), DTYPES):
        x = torch.randn(1, heads, 6, 128).to(dtype)
        statistics = codec.calibrate(x)
        single = [codec.quantize(x[:, :, t : t + 1], statistics) for t in range(x.shape[2])]
        assert same({name: torch.cat([s[name] for s in single], dim=2) for name in single[0]}, codec.quantize(x, statistics))


@pytest.mark.sums
@every_format
def test_rows_stand_alone(name):
    x = torch.randn(3, 2, 9, 128) * torch.tensor([1.0, 100.0, 0.01])[:, None, None, None]
    for codec in sides(name):
        together = encode(codec, x)
        for row in range(3):
            assert same({name: t[row : row + 1] for name, t in together.items()}, encode(codec, x[row : row + 1]))


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "identity"])
def test_every_dtype_gets_the_codes_of_its_numbers(name):
    for codec, dtype in itertools.product(sides(name), (torch.bfloat16, torch.float16)):
        x = torch.randn(2, 2, 9, 128).to(dtype)
        assert same(encode(codec, x), encode(codec, x.float()))
        decoded = codec.dequantize(encode(codec, x), 128, dtype)
        assert decoded.dtype == dtype
        assert torch.equal(decoded, roundtrip(codec, x.float()).to(dtype))


@every_format
def test_layout_of_the_input_does_not_matter(name):
    flat = torch.randn(2, 9, 3, 2 * 128)
    view = flat.transpose(1, 2)[..., ::2]
    assert not view.is_contiguous()
    for codec in sides(name):
        before = view.clone()
        assert same(encode(codec, view), encode(codec, view.contiguous()))
        assert torch.equal(view, before)


@pytest.mark.sums
@every_format
def test_codes_can_be_moved_about(name):
    """What caches do with them: gather tokens and rows, repeat, join, slice, write in place."""
    x = torch.randn(2, 3, 9, 128)
    order = torch.tensor([8, 0, 3])
    for codec in sides(name):
        codes = encode(codec, x)
        statistics = {b.name for b in codec.buffers(128) if b.tokens == "once"}
        decoded = codec.dequantize(codes, 128)

        def tokens(move, codes=codes, statistics=statistics):
            return {name: t if name in statistics else move(t) for name, t in codes.items()}

        moved = tokens(lambda t: t.gather(2, order[:, None].expand(*t.shape[:2], 3, t.shape[3])))
        assert same_decoded(codec.dequantize(moved, 128), decoded[:, :, order], codec)
        moved = tokens(lambda t: t.index_select(2, order))
        assert same_decoded(codec.dequantize(moved, 128), decoded[:, :, order], codec)
        assert same_decoded(codec.dequantize(tokens(lambda t: t[:, :, 3:8]), 128), decoded[:, :, 3:8], codec)
        assert same_decoded(codec.dequantize(tokens(lambda t: torch.cat([t[:, :, 5:], t[:, :, :5]], 2)), 128), decoded.roll(-5, 2), codec)
        assert same_decoded(codec.dequantize({k: t[[1, 0, 1]] for k, t in codes.items()}, 128), decoded[[1, 0, 1]], codec)
        repeated = {k: t.repeat_interleave(2, 0) for k, t in codes.items()}
        assert same_decoded(codec.dequantize(repeated, 128), decoded.repeat_interleave(2, 0), codec)
        stored = {k: torch.zeros_like(t).copy_(t) for k, t in codes.items()}
        assert same_decoded(codec.dequantize(stored, 128), decoded, codec)


@pytest.mark.sums
@every_format
def test_attention_may_rotate_the_query_instead(name):
    x, q = torch.randn(1, 2, 9, 128), torch.randn(1, 2, 4, 128)
    for codec in sides(name):
        codes = encode(codec, x)
        levels, scale, offset, center = codec.unpack(codes, 128)
        groups = 1 if scale is None else scale.shape[-1]
        stored = levels.unflatten(-1, (groups, -1))
        stored = stored if scale is None else stored * scale.unsqueeze(-1)
        stored = sum(x for x in (offset, center) if x is not None) + stored.flatten(-2)
        assert_close(codec.rotate(q) @ stored.mT, q @ codec.dequantize(codes, 128).mT, rounding(128, 128))
        assert (codec.rotation is None) == (codec.rotate(q) is q)


@every_format
def test_zeros_stay_zeros(name):
    for codec, tokens in itertools.product(sides(name), (1, 5)):
        x = torch.zeros(1, 2, tokens, 128)
        assert torch.equal(roundtrip(codec, x), x)


@every_format
def test_large_numbers(name):
    x = torch.randn(1, 2, 64, 128) * 1e4
    for codec in sides(name):
        if name.startswith("nvfp4"):  # saturates at 6 x 448
            center = codec.calibrate(x).get("center", torch.zeros(1))
            assert (roundtrip(codec, x) - center).abs().max() == pytest.approx(2688)
        else:
            assert error(codec, x) <= 1.1 * FORMAT_ERRORS[FORMATS[name]]


@every_format
def test_small_numbers(name):
    x = torch.randn(1, 2, 64, 128) * 1e-6
    for codec in sides(name):
        assert (roundtrip(codec, x) - x).abs().max() <= 5e-6
        if all(b.dtype == torch.float32 for b in codec.buffers(128) if b.role == "scales"):
            assert error(codec, x) <= 1.1 * FORMAT_ERRORS[FORMATS[name]]


@every_format
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so_and_spoils_nothing_else(name, bad):
    clean = torch.randn(2, 3, 9, 128)
    x = clean.clone()
    x[1, 2, 4, 7] = bad
    # What shares a scale with it goes too.
    spoiled = torch.zeros(2, 3, 9, 1, dtype=torch.bool)
    spoiled[1, 2, 4] = True
    if name in FROM_THE_BLOCK:
        spoiled[1] = True
    elif name.endswith("_token"):
        spoiled[1, :, 4] = True
    for codec in sides(name):
        statistics = codec.calibrate(clean)
        before, after = codec.quantize(clean, statistics), codec.quantize(x, statistics)
        for key in before:
            kept = ~(spoiled if before[key].shape[1] == 3 else spoiled.any(1, keepdim=True))
            assert torch.equal(before[key][kept.squeeze(-1)], after[key][kept.squeeze(-1)])
        decoded = codec.dequantize(after | statistics, 128)
        assert not decoded[1, 2, 4, 7].isfinite()
        expected = codec.dequantize(before | statistics, 128)
        assert torch.equal(decoded[~spoiled.squeeze(-1)], expected[~spoiled.squeeze(-1)])


@every_format
def test_what_is_not_refused_works(name):
    format = FORMATS[name]
    accepted = [head_dim for head_dim in (1, 8, 16, 20, 33, 40, 48, 68, 72, 100, 576) if not format.refuses(head_dim)]
    assert accepted
    for head_dim in accepted:
        format.check(head_dim)
        x = torch.randn(1, 2, 3, head_dim)
        assert all(roundtrip(codec, x).shape == x.shape for codec in sides(name))


@pytest.mark.parametrize(
    "name", [name for name in FORMATS if name not in ("identity", "int8", "int8_token", "int8_asymmetric", "int8_uncentered")]
)
def test_refusals_name_the_format_the_number_and_a_way_out(name):
    with pytest.raises(ValueError, match=f"format '{name}' cannot hold (keys|values) of head_dim 65: .*multiple.*; use '"):
        FORMATS[name].check(65)


def test_covering_formats_have_every_kind_of_the_registry():
    def kinds(names):
        layouts = {codec.packed_layout for name in names for codec in FORMATS[name].codecs()}
        return {(field.name, getattr(layout, field.name)) for layout in layouts for field in dataclasses.fields(layout)}

    assert kinds(FORMATS) - kinds(COVER) == {("search", 1)}  # which only quantizes: in tests of all formats


def test_names_of_the_registry():
    for name, format in REGISTRY.items():
        assert format.name == name and FORMATS[name] == format
        assert resolve(name) is format and resolve(format) is format
    assert len(set(REGISTRY.values())) == len(REGISTRY) <= 16
    assert not any(name.endswith("_uncentered") for name in REGISTRY)


@every_format
def test_other_formats_are_named_with_their_options(name):
    format = FORMATS[name]
    assert resolve(format) is format
    assert dataclasses.replace(format) == format and hash(dataclasses.replace(format)) == hash(format)
    with pytest.raises(dataclasses.FrozenInstanceError):
        format.preset = None
    if name not in REGISTRY:
        with pytest.raises(ValueError, match=f"format='{name}' is not registered: pass the object formats") as caught:
            resolve(name)
        assert eval(str(caught.value).rsplit("object ")[1], {"formats": formats}) == format


def test_resolve_refuses():
    with pytest.raises(ValueError, match="'turboquant_4bits_nc' is unknown: did you mean 'turboquant_4bit_nc'"):
        resolve("turboquant_4bits_nc")
    with pytest.raises(ValueError, match="'zip' is unknown: known are identity, int8, .*turboquant_3bit_nc"):
        resolve("zip")
    for other in (8, None, Int8, {"int8"}):
        with pytest.raises(TypeError, match="expected a name or a qkvcache.formats.Format"):
            resolve(other)


def test_a_format_of_ones_own_takes_one_class():
    @dataclasses.dataclass(frozen=True)
    class Mixed(Format):
        @property
        def name(self) -> str:
            return "mixed"

        def codecs(self) -> tuple[Codec, Codec]:
            return FORMATS["int8"].key, FORMATS["turboquant_3bit_nc"].value

    assert resolve(Mixed()).bytes_per_token(128) == 132 + 52
    assert Mixed().bytes_per_token(128, value_dim=64) == 132 + 28
    with pytest.raises(ValueError, match="values of head_dim 65"):
        Mixed().check(128, value_dim=65)
