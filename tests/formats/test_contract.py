"""What a format promises (`formats/base.py`), asked of every one."""

import dataclasses

import pytest
import torch

from qkvcache.formats import FP8, NVFP4, REGISTRY, Codec, Format, HadaQuant, Int4, Int8, TurboQuant, resolve
from tests import promises
from tests.matrix import COVER, FORMAT_ERRORS, FORMATS
from tests.promises import FORMAT_CHECKS, roundtrip
from tests.promises import rms_error as error

DIMS = [64, 80, 96, 112, 128, 192, 256]
OF_SHAPES = (promises.returns_what_is_declared, promises.counts_its_bytes)

every_format = pytest.mark.parametrize("name", FORMATS)


def sides(name: str) -> tuple[Codec, ...]:
    return tuple(dict.fromkeys((FORMATS[name].key, FORMATS[name].value)))


def accepted(name: str) -> list[int]:
    """An int4 scale of 32 channels fits neither 80 nor 112; everything else fits everywhere."""
    return [dim for dim in DIMS if not (name in ("int4", "int4_group") and dim in (80, 112))]


@pytest.mark.sums
@every_format
@pytest.mark.parametrize("check", FORMAT_CHECKS, ids=lambda check: check.__name__)
def test_what_every_format_promises(name, check):
    for head_dim in accepted(name) if check in OF_SHAPES else (64, 128):
        check(FORMATS[name], head_dim)


@pytest.mark.parametrize(
    ("name", "at_64", "at_128"),
    [
        ("identity", 256, 512),
        ("int8", 136, 264),
        ("int8_asymmetric", 136, 264),
        ("fp8", 136, 264),
        ("fp8_tensor", 128, 256),
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


@every_format
def test_error_on_normal_data(name):
    bound = FORMAT_ERRORS[FORMATS[name]]
    worst = max(error(codec, torch.randn(1, 4, 128, 128)) for codec in sides(name))
    assert 0.8 * bound <= worst <= bound  # a bound that stays close says something
    for head_dim in accepted(name):
        assert max(error(codec, torch.randn(1, 2, 64, head_dim)) for codec in sides(name)) <= 1.2 * bound, head_dim


@every_format
def test_large_and_small_numbers(name):
    large, bound = torch.randn(1, 2, 64, 128) * 1e4, 1.1 * FORMAT_ERRORS[FORMATS[name]]
    small = large * 1e-10
    for codec in sides(name):
        if name.startswith("nvfp4"):  # saturates at 6 x 448
            center = codec.calibrate(large).get("center", torch.zeros(1))
            assert (roundtrip(codec, large) - center).abs().max() == pytest.approx(2688)
        else:
            assert error(codec, large) <= bound
        assert (roundtrip(codec, small) - small).abs().max() <= 5e-6
        if all(b.dtype == torch.float32 for b in codec.buffers(128) if b.role == "scales"):
            assert error(codec, small) <= bound


@pytest.mark.parametrize(
    "name", [name for name in FORMATS if name not in ("identity", "int8", "int8_token", "int8_asymmetric", "int8_uncentered")]
)
def test_refusals_name_the_format_the_number_and_a_way_out(name):
    with pytest.raises(ValueError, match=f"format '{name}' cannot hold (keys|values) of head_dim 65: .*multiple.*; use '"):
        FORMATS[name].check(65)


REFUSED = [
    (FP8, {"dtype": "e3m4"}, "dtype='e3m4': expected 'e4m3' or 'e5m2'"),
    (FP8, {"scale": "head"}, "scale='head': expected 'token_head', 'token' or 'tensor'"),
    (Int4, {"rule": "gptq"}, "rule='gptq': expected 'hadamard', 'vllm' or 'group'"),
    (Int4, {"group_size": 0}, "group_size=0"),
    (Int4, {"group_size": 32.0}, "group_size=32.0"),
    (Int4, {"rule": "vllm", "group_size": 64}, "group_size=64 with rule='vllm'"),
    (Int8, {"scale": "head"}, "scale='head': expected 'token_head' or 'token'"),
    (Int8, {"scale": "token", "symmetric": False}, "scale='token' with symmetric=False"),
    (NVFP4, {"scale_search": "max"}, "scale_search='max': expected 'amax', 'four_over_six' or 'mse'"),
    (TurboQuant, {"preset": "2bit"}, "preset='2bit': expected 'k8v4', '4bit_nc', 'k3v4_nc' or '3bit_nc'"),
    (HadaQuant, {"key_bits": 5}, "key_bits=5: expected 2, 3 or 4"),
]
"""Options that formats refuse."""


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_wrong_options_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**options)


@pytest.mark.parametrize(
    ("format", "head_dim", "message", "others"),
    [
        (Int4(), 80, "head_dim 80: group_size=32 does not divide it; group_size=16 does", [Int4(group_size=16), Int4("vllm")]),
        (NVFP4(), 72, "head_dim 72: scales span 16 channels.*use 'int4_vllm'", []),
        (TurboQuant("k3v4_nc"), 68, "keys of head_dim 68: 3-bit codes are read 16 channels at a time", [TurboQuant("4bit_nc")]),
    ],
    ids=str,
)
def test_head_dims_are_refused_with_what_holds_them(format, head_dim, message, others):
    with pytest.raises(ValueError, match=message):
        format.check(head_dim)
    for other in others:
        other.check(head_dim)


def test_covering_formats_have_every_kind_of_the_registry():
    def kinds(names):
        layouts = {codec.packed_layout for name in names for codec in FORMATS[name].codecs()}
        return {(field.name, getattr(layout, field.name)) for layout in layouts for field in dataclasses.fields(layout)}

    assert kinds(FORMATS) - kinds(COVER) == {("search", 1)}  # which only quantizes: in tests of all formats


def test_the_registry_is_small():
    assert len(set(REGISTRY.values())) == len(REGISTRY) <= 16 and REGISTRY.keys() <= FORMATS.keys()
    assert not any(name.endswith("_uncentered") for name in REGISTRY)


@every_format
def test_names_of_the_registry_and_objects_of_others(name):
    format = FORMATS[name]
    assert resolve(format) is format and format.name == name
    with pytest.raises(dataclasses.FrozenInstanceError):
        format.preset = None
    if name in REGISTRY:
        assert resolve(name) is REGISTRY[name] == format
        return
    with pytest.raises(ValueError, match=f"format='{name}' is unknown: .* Others are objects"):
        resolve(name)


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
