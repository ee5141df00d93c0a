"""What only a GPU shows: bf16 kernels, offloading with its streams, and the allocator's own count of bytes."""

import pytest
import torch
from matrix import FORMATS, model
from reference import ZONES, decoded
from transformers import DynamicCache

from qkvcache import CompressedCache

pytestmark = pytest.mark.gpu

ZONE = ZONES["zones"]


@pytest.fixture(scope="module")
def network():
    import copy

    return copy.deepcopy(model("llama")).to("cuda", torch.bfloat16)


def prompt(rows: int = 2, length: int = 300) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 100, (rows, length), device="cuda")
    mask = torch.ones_like(ids)
    mask[1:, :7] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(network, cache, inputs=None, **options):
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True} | options
    return network.generate(**(inputs or prompt()), past_key_values=cache, output_logits=True, **options)


@pytest.mark.parametrize("format", FORMATS)
def test_formats_equal_their_codes_decoded(network, format):
    cache = CompressedCache(network.config, format=format, **ZONE)
    expected = generate(network, decoded(cache))
    got = generate(network, cache)
    # bf16 rounds in another order; once a token differs, the two go on about different texts.
    same = (got.sequences == expected.sequences)[:, -20:].all(0).cummin(0).values
    steps = int(same.sum())
    assert steps >= 3
    for mine, theirs in zip(got.logits[:steps], expected.logits[:steps], strict=True):
        assert (mine - theirs).abs().max() <= 0.06 * theirs.abs().max()


@pytest.mark.parametrize("format", ["identity", "int8", "turboquant_3bit_nc"])
def test_offloading_equals_resident(network, format):
    resident = CompressedCache(network.config, format=format, **ZONE)
    offloaded = CompressedCache(network.config, format=format, offloading=True, **ZONE)
    expected = generate(network, resident)
    got = generate(network, offloaded)
    assert torch.equal(got.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(got.logits, expected.logits, strict=True))
    torch.cuda.synchronize()
    places = [{x.device.type for _, x in layer.tensors()} for layer in offloaded.layers]
    assert {"cpu"} in places  # the layers that do not run next


def prefill(network, cache, length: int) -> int:
    """Bytes that the cache of a prompt of `length` tokens adds to what the allocator holds."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        network.model(prompt(4, length)["input_ids"], past_key_values=cache)
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("format", ["int8", "nvfp4", "turboquant_3bit_nc"])
def test_the_allocator_agrees_with_nbytes(network, format):
    network(prompt(4, 64)["input_ids"])  # libraries take their workspaces
    dense, compressed = DynamicCache(config=network.config), CompressedCache(network.config, format=format)
    dense_bytes = prefill(network, dense, 4096)
    held = prefill(network, compressed, 4096)
    memory = compressed.memory()
    assert dense_bytes == pytest.approx(memory.dense, rel=0.02)
    assert held == pytest.approx(memory.total, rel=0.05)
    assert held < dense_bytes / memory.ratio * 1.05


def test_other_streams(network):
    """A cache filled on a stream of its own reads the same."""
    expected = generate(network, CompressedCache(network.config, format="int8", **ZONE)).sequences
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = generate(network, CompressedCache(network.config, format="int8", **ZONE)).sequences
    stream.synchronize()
    assert torch.equal(got, expected)
