import numpy as np
import pytest
import torch

from qkvcache.formats import Int4
from qkvcache.formats.packing import lookup
from qkvcache.formats.rotation import Hadamard, rotation_block
from tests.promises import encode, roundtrip
from tests.promises import rms_error as error

DIMS = [64, 80, 96, 112, 128, 192, 256]


def test_group_codes_by_hand():
    x = torch.zeros(1, 1, 1, 64)
    x[..., :8] = torch.tensor([7.0, -7.0, 3.4, 3.6, -3.4, -3.6, 0.4, 1.0])
    x[..., 32] = 14
    codes = encode(Int4("group").value, x)
    assert codes["scale"].flatten().tolist() == [1.0, 2.0]
    # Word j holds channels j, j + 16, j + 32 and j + 48.
    words = codes["codes"].view(torch.uint16).flatten().tolist()
    assert words == [0x8F8F, 0x8881, 0x888B, 0x888C, 0x8885, 0x8884, 0x8888, 0x8889, *[0x8888] * 8]


def test_hadamard_rotates_keys_only():
    format = Int4(center=False)
    assert (format.key.rotation, format.value.rotation) == (Hadamard(), None)
    x = torch.randn(2, 3, 40, 128)
    turned, plain = encode(format.key, x), encode(Int4("group").value, Hadamard().apply(x))
    assert all(torch.equal(turned[name], plain[name]) for name in plain)
    x[..., 3] *= 20
    assert error(format.key, x) < 0.6 * error(format.value, x)


@pytest.mark.parametrize("magnitude", [1.0, 3e-7])  # the latter under scales of few bits, which fp16 rounds down by a third
def test_groups_are_symmetric(magnitude):
    x = torch.randn(2, 3, 40, 128) * magnitude
    assert torch.equal(roundtrip(Int4("group").value, -x), -roundtrip(Int4("group").value, x))


def vllm_int4(x: np.ndarray, signs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales, zero points and reconstruction of `[N, D]` by vLLM's rule, its unnormalized rotation included, in float64."""
    head_dim = x.shape[-1]
    block = rotation_block(head_dim)
    hadamard = np.kron(np.eye(head_dim // block), pytest.importorskip("scipy.linalg").hadamard(block))
    y = (x * signs) @ hadamard
    scale = (y.max(-1) - y.min(-1)) / 15
    zero = np.clip(np.floor(-y.min(-1) / scale + 0.5), 0, 15)
    codes = np.clip(np.floor(y / scale[:, None] + zero[:, None] + 0.5), 0, 15)
    restored = ((codes - zero[:, None]) * scale[:, None]) @ hadamard / block * signs
    return codes, scale / block**0.5, zero, restored


@pytest.mark.parametrize("head_dim", DIMS)
def test_vllm_rule_against_numpy(head_dim):
    x = torch.randn(1, 2, 100, head_dim)
    generator = torch.Generator().manual_seed(0x9E3779B9)
    signs = (torch.bernoulli(torch.full((head_dim,), 0.5), generator=generator) * 2 - 1).double().numpy()
    codes, scale, zero, restored = vllm_int4(x.reshape(-1, head_dim).double().numpy(), signs)

    ours = encode(Int4("vllm").value, x)
    bits = ours["scale"].view(torch.int32).flatten()
    assert torch.equal(bits & 15, torch.from_numpy(zero).int())
    np.testing.assert_allclose((bits & ~15).view(torch.float32).numpy(), scale, rtol=2**-19)
    # Two roundings of the scale apart, a code may differ where a channel lies between two of them.
    differ = lookup(ours, 4, tuple(range(16))).reshape(-1, head_dim).numpy() != codes
    assert differ.mean() < 1e-3
    np.testing.assert_allclose(
        roundtrip(Int4("vllm").value, x).reshape(-1, head_dim)[~differ.any(-1)], restored[~differ.any(-1)], atol=1e-5
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_vllm_rule_keeps_a_dominant_first_channel(sign):
    # Rotated, it is a constant: the range leaves out zero, and vLLM's zero point clips. There, the error is 1.
    x = torch.randn(1, 2, 40, 128)
    x[..., 0] += sign * 100
    assert error(Int4("vllm").value, x) < 0.05
    x = torch.zeros(1, 1, 1, 128)
    x[..., 0] = sign
    torch.testing.assert_close(roundtrip(Int4("vllm").value, x), x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", ["hadamard", "group"])
@pytest.mark.parametrize("group_size", [16, 64, 128])
def test_other_groups(rule, group_size):
    format = Int4(rule, group_size=group_size, center=False)
    assert format.name.endswith(f"_g{group_size}_uncentered")
    assert format.bytes_per_token(128) == 128 + 4 * 128 // group_size
    assert error(format.key, torch.randn(1, 2, 40, 128)) < 0.13
