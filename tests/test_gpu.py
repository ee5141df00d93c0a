"""What only a GPU shows: bf16 kernels, offloading with its streams, and the allocator's own count of bytes."""

import copy
import functools
import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from qkvcache import CompressedCache, warmup
from qkvcache.releases import passing
from tests.matrix import FORMATS, model
from tests.reference import ZONES, assert_close, count_decoded_layers, count_fused, decoded, forward
from tests.seeds import SEED

pytestmark = pytest.mark.gpu

ZONE = ZONES["zones"]


@functools.lru_cache
def on_gpu(dtype):
    return copy.deepcopy(model("llama")).to("cuda", dtype)


@pytest.fixture
def network():
    return on_gpu(torch.bfloat16)


def prompt(rows: int = 2, length: int = 300) -> dict[str, torch.Tensor]:
    torch.manual_seed(SEED + 1)
    ids = torch.randint(3, 100, (rows, length), device="cuda")
    mask = torch.ones_like(ids)
    mask[1:, :7] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(network, cache, inputs=None, **options):
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True} | options
    return network.generate(**(inputs or prompt()), **passing(cache), output_logits=True, **options)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-3), (torch.bfloat16, 0.06)])
@pytest.mark.parametrize("format", FORMATS)
def test_formats_equal_their_codes_decoded(format, dtype, tolerance):
    """Each step from the same codes, so that another order of rounding turns none of them. Random weights make the most of bf16's.

    In fp32 the queries, rounded to fp16 for the fused kernel's products, are what differs.
    """
    network = on_gpu(dtype)
    cache = CompressedCache(network.config, format=FORMATS[format], **ZONE)
    ids, mask = prompt().values()
    for begin, end in ((0, 290), (290, 291), (291, 294), (294, 300)):
        expected = forward(network, decoded(cache), ids, mask, begin, end)
        with count_decoded_layers() as dense:
            got = forward(network, cache, ids, mask, begin, end)
        # Where scales are by group, codes are multiplied out in fp16.
        assert_close(got.float(), expected.float(), max(tolerance, 0.02 if format.startswith("int4") else 0))
        assert not dense


@pytest.mark.parametrize("format", FORMATS)
def test_generate_takes_the_fused_path(network, format, monkeypatch):
    """By itself, at every step after the prefill, in every layer."""
    calls = count_fused(monkeypatch)
    generate(network, CompressedCache(network.config, format=FORMATS[format]))
    assert len(calls) == 19 * network.config.num_hidden_layers


def test_warmup_compiles_all_that_generate_needs(network):
    import triton

    warmup(network, cache := CompressedCache(network.config, format="turboquant_k3v4_nc"))
    assert not cache.get_seq_length()
    compiled = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **event: compiled.append(event["fn"].name)
    try:
        generate(network, cache, max_new_tokens=80)
        generate(network, CompressedCache(network.config, format="turboquant_k3v4_nc"), {k: v[:1] for k, v in prompt().items()})
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert not compiled


@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_those_of_a_cpu(format):
    x = torch.randn(2, 2, 100, 64, dtype=torch.bfloat16)
    for codec in FORMATS[format].codecs():
        here, there = (codec.dequantize(codes | statistics, 64) for codes, statistics in ((encoded(codec, x)), (encoded(codec, x.cuda()))))
        # A value on the border of two levels may fall to either side.
        assert ((here - there.cpu()).abs() > 1e-5).float().mean() < 0.01


def encoded(codec, x):
    statistics = codec.calibrate(x)
    return codec.quantize(x, statistics), statistics


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
    """Bytes that the cache of a prompt of `length` tokens asks the allocator for: it may give a block that is up to 1 MB larger."""
    gc.collect()
    torch.cuda.synchronize()
    requested = "requested_bytes.all.current"
    before = torch.cuda.memory_stats()[requested]
    with torch.no_grad():
        network.model(prompt(4, length)["input_ids"], **passing(cache))
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()[requested] - before


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


@pytest.mark.parametrize("max_length", [0, 2048], ids=["growing", "max_length"])
@pytest.mark.parametrize("format", ["int8", "turboquant_4bit_nc"])
def test_two_turns_in_a_fresh_process(format, max_length):
    script = Path(__file__).parent / "two_turns.py"
    done = subprocess.run([sys.executable, script, "cuda", format, str(max_length)], capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["seen"] == found["expected"] and found["kl"] < 0.05


def test_other_streams(network):
    """A cache filled on a stream of its own reads the same."""
    expected = generate(network, CompressedCache(network.config, format="int8", **ZONE)).sequences
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = generate(network, CompressedCache(network.config, format="int8", **ZONE)).sequences
    stream.synchronize()
    assert torch.equal(got, expected)
