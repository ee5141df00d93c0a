"""The bounds of `tolerance.py` from both sides: rounding comes to more than a tenth of them, and one wrong code exceeds them."""

import copy

import pytest
import torch

from qkvcache import CompressedCache
from tests.matrix import COVER, FORMATS, model
from tests.promises import encode
from tests.reference import MODES, ZONES, assert_close, forward
from tests.tolerance import of_model, rounding, same_decoded, same_vectors

pytestmark = pytest.mark.sums


def off(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def turn_one(planes: dict[str, torch.Tensor], bit: int = 0) -> None:
    """Turns a bit of the first code of a token and head."""
    planes["codes" if "codes" in planes else "low"][0, 0, 0].view(torch.uint8)[0] ^= 1 << bit


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "identity"])
def test_one_wrong_code_is_another_vector(name):
    for codec in FORMATS[name].codecs():
        codes = encode(codec, torch.randn(2, 2, 5, 128))
        right = codec.dequantize(codes, 128)
        alone = torch.cat([codec.dequantize({k: x[row : row + 1] for k, x in codes.items()}, 128) for row in range(2)])
        assert same_decoded(alone, right, codec)
        turn_one(codes)
        wrong = codec.dequantize(codes, 128)
        assert not same_vectors(wrong, right)
        assert same_vectors(wrong[1:], right[1:])


def test_a_sum_of_fp32_comes_near_its_bound():
    found = []
    for length in (32, 64, 128, 512):
        x, y = torch.randn(2, 300, length).unbind(0)
        found.append(off((x @ y.mT).double(), x.double() @ y.double().mT) / rounding(length))
    assert 0.1 < max(found) < 1, found


def test_a_model_in_fp32_comes_near_its_bound():
    """Beside the same model in fp64, in which those with experts do not run. How much of its bound rounding takes depends on the model."""
    ids, mask = MODES["padded"].inputs()
    found = {}
    for name in ("llama", "qwen3", "phi3", "mistral", "gpt2", "gemma3"):
        pair = model(name), copy.deepcopy(model(name)).double()
        with torch.no_grad():
            logits = [network(ids, attention_mask=mask).logits[mask.bool()].double() for network in pair]
        found[name] = off(*logits) / of_model(pair[0], ids.shape[1])
    assert 0.1 < max(found.values()) < 1, found


@pytest.mark.parametrize("format", [name for name in COVER if name != "identity"])
def test_one_wrong_code_in_a_cache_exceeds_the_bound_of_a_model(format):
    network = model("llama")
    ids, mask = MODES["single"].inputs()
    caches = []
    for _ in range(2):
        caches.append(CompressedCache(network.config, format=FORMATS[format], **ZONES["zones"]))
        forward(network, caches[-1], ids, mask, 0, 30)
    right = forward(network, copy.deepcopy(caches[0]), ids, mask, 30, 31)
    assert_close(forward(network, caches[0], ids, mask, 30, 31), right, of_model(network))
    turn_one(next(caches[1].layers[0].storage.tokens.packed(0, 10**6)).codes, bit=3)
    with pytest.raises(AssertionError):
        assert_close(forward(network, caches[1], ids, mask, 30, 31), right, of_model(network))
