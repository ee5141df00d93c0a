import pytest
import torch

from qkvcache.formats import rotation
from qkvcache.formats.rotation import Hadamard
from tests.tolerance import same_vectors

DIMS = [64, 80, 96, 112, 128, 192, 256]
CPU = torch.device("cpu")


def dense(head_dim: int, randomized: bool) -> torch.Tensor:
    """The whole map as a matrix, from scipy's Hadamard matrices."""
    hadamard = torch.from_numpy(pytest.importorskip("scipy.linalg").hadamard(rotation.rotation_block(head_dim))).double()
    matrix = torch.block_diag(*[hadamard / hadamard.shape[0] ** 0.5] * (head_dim // hadamard.shape[0]))
    return matrix * rotation.random_signs(head_dim, CPU).double() if randomized else matrix


@pytest.mark.parametrize(("head_dim", "block"), [(64, 64), (80, 16), (96, 32), (112, 16), (128, 128), (192, 64), (256, 256), (33, 1)])
def test_block_is_largest_power_of_two(head_dim, block):
    assert rotation.rotation_block(head_dim) == block


@pytest.mark.parametrize("randomized", [False, True])
@pytest.mark.parametrize("head_dim", DIMS)
def test_against_scipy(head_dim, randomized):
    x = torch.randn(2, 3, 5, head_dim)
    expected = (x.double() @ dense(head_dim, randomized).T).float()
    torch.testing.assert_close(Hadamard(randomized).apply(x), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.sums
@pytest.mark.parametrize("randomized", [False, True])
@pytest.mark.parametrize("head_dim", [*DIMS, 33])
def test_undo_and_dot_products(head_dim, randomized):
    turn = Hadamard(randomized)
    x, y = torch.randn(2, 4, 7, head_dim).unbind(0)
    assert same_vectors(turn.undo(turn.apply(x)), x)
    torch.testing.assert_close((turn.apply(x) * turn.apply(y)).sum(-1), (x * y).sum(-1), rtol=1e-5, atol=1e-4)


@pytest.mark.sums
@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_vector_alone_turns_as_in_a_block(head_dim, dtype):
    # An fp32 product fails this: one row goes through another routine than two.
    x = torch.randn(1, 1, 12, head_dim).to(dtype)
    alone = torch.cat([Hadamard().apply(x[:, :, t : t + 1]) for t in range(12)], dim=2)
    assert torch.equal(alone, Hadamard().apply(x))


def test_signs_are_those_of_vllm():
    signs = rotation.random_signs(128, CPU)
    generator = torch.Generator().manual_seed(0x9E3779B9)
    assert torch.equal(signs, 2 * torch.bernoulli(torch.full((128,), 0.5), generator=generator) - 1)
    assert set(signs.tolist()) == {-1.0, 1.0}


def test_matrices_made_in_inference_mode_have_gradients():
    with torch.inference_mode():
        Hadamard(randomized=True).apply(torch.randn(1, 32))
        Hadamard(randomized=True).undo(torch.randn(1, 32))
    x = torch.randn(1, 32, requires_grad=True)
    Hadamard(randomized=True).undo(Hadamard(randomized=True).apply(x)).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(1, 32))
