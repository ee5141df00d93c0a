"""`max_length` on a GPU: kernels that count on the device, CUDA graphs, no synchronization, one launch a step, bytes by the allocator."""

import functools
import gc
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache

from qkvcache import CompressedCache, demo
from qkvcache.kernels import attend, attend_on_codes
from qkvcache.kernels.host import dispatch
from qkvcache.kernels.paged_inputs import DROPPED, LENGTH, TOKENS
from qkvcache.kernels.store import reference as stores
from qkvcache.layers.compressed import CompressedLayer
from qkvcache.releases import passing
from qkvcache.storage import Storage
from tests.matrix import FORMATS
from tests.reference import assert_close
from tests.test_gpu import on_gpu, prompt

tables, rotation_table = (
    pytest.importorskip("qkvcache.kernels.host.tables").tables,
    pytest.importorskip("qkvcache.kernels.store.triton_dequantize").rotation_table,
)
pytestmark = pytest.mark.gpu
FOUR_BIT = "turboquant_4bit_nc"
ROWS, HEADS, GROUP, DIM = 2, 4, 4, 128


def new(tokens: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(rows, HEADS, tokens, DIM, device="cuda").bfloat16() for _ in range(2))


def query(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, HEADS * GROUP, 1, DIM, device="cuda").bfloat16()


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.03) -> None:
    assert got.isfinite().all()
    assert ((got.float() - expected.float()).norm() / expected.float().norm()).item() <= tolerance


# Kernels


@pytest.mark.parametrize("format", FORMATS)
def test_steps_and_attention_equal_torch_operations(format):
    layer = CompressedLayer(FORMATS[format], 4, 32, 700)
    reference = CompressedLayer(FORMATS[format], 4, 32, 700)
    x = new(500)
    layer.update(*x), reference.update(*x)
    layer.commit(), reference.commit()
    mask = torch.ones(ROWS, 1, 1, 700, dtype=torch.bool, device="cuda")
    mask[1, ..., 3:40] = False
    for step in range(100):
        x, q = new(1), query()
        key, _ = layer.update(*x)
        stores.step(reference.storage.inputs, x)
        if step % 20 and step < 98:
            continue
        seen, region = layer.storage.seq_length, layer.storage.tokens.length
        lengths = [held.storage.rows[:, [TOKENS, LENGTH]].tolist() for held in (layer, reference)]
        assert lengths[0] == lengths[1] == [[501 + step, 464 + step]] * ROWS == [[seen, region]] * ROWS
        for given in (None, mask):
            got = attend_on_codes(q, key.attention_inputs, given)
            wanted = attend(q.float(), layer.storage.attention_inputs(), None if given is None else given[..., :seen])
            close(got, wanted)
    exact = ((*held.storage.sinks, *held.storage.residual) for held in (layer, reference))
    assert all(torch.equal(a, b) for a, b in zip(*exact, strict=True))
    reference.storage.counts_stale = True  # it was stepped behind the host's back
    for ours, theirs in zip(layer.dense(), reference.dense(), strict=True):
        # A value on the border of two levels may fall to either side.
        assert ((ours.float() - theirs.float()).abs() > 0.02).float().mean() < 0.01


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 5, 32])
def test_the_step_kernel_writes_the_codes_of_torch_operations(format, tokens):
    from qkvcache.kernels.store.triton_store import launch_of_step

    codecs = FORMATS[format].key, FORMATS[format].value
    x = new(tokens)
    ours, theirs = (Storage(codecs, x, 4, 32, 200) for _ in range(2))
    ours.tokens.calibrate(x), theirs.tokens.calibrate(x)
    for _ in range(200 // tokens + 2):  # over the limit
        x = new(tokens)
        launch_of_step(ours.inputs, x)(x)
        stores.step(theirs.inputs, x)
    assert torch.equal(ours.rows, theirs.rows) and ours.control[DROPPED] == theirs.control[DROPPED] > 0
    exact = ((*held.sinks, *held.residual) for held in (ours, theirs))
    assert all(torch.equal(a, b) for a, b in zip(*exact, strict=True))
    region = int(ours.rows[0, LENGTH])
    for side, codec in enumerate(codecs):
        got, wanted = (codec.dequantize(held.tokens.pages.gather(side, region)[0], DIM) for held in (ours, theirs))
        assert ((got - wanted).abs() > 1e-3).float().mean() < 0.01


# No synchronization, one launch


@pytest.mark.parametrize("format", ["identity", "int8", FOUR_BIT])
def test_a_step_does_not_wait_for_the_device(format):
    layer = CompressedLayer(FORMATS[format], 4, 32, 400)
    layer.update(*new(300))
    steps = [(new(1), query()) for _ in range(40)]
    for x, q in steps[:4]:
        key, _ = layer.update(*x)
        attend_on_codes(q, key.attention_inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for seen, (x, q) in enumerate(steps[4:], 305):
            key, _ = layer.update(*x)
            attend_on_codes(q, key.attention_inputs)
            assert layer.get_seq_length() == seen and layer.get_mask_sizes(1) == (seen + 1, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert layer.get_seq_length() == 340 == layer.storage.rows[0, TOKENS]


@pytest.mark.parametrize("format", FORMATS)
def test_an_update_is_one_launch(format):
    layer = CompressedLayer(FORMATS[format], 4, 32, 400)
    layer.update(*new(300))
    layer.update(*new(1))
    x = new(1)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]) as profile:
        layer.update(*x)
        torch.cuda.synchronize()
    launched = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(launched) == 1 and "_step_kernel" in launched[0], launched


# generate


@functools.lru_cache
def embedded():
    return demo.load(torch.bfloat16, "cuda")


def generate(cache, inputs, **options):
    options = {"max_new_tokens": 50, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    options |= {"return_dict_in_generate": True, "output_logits": True}
    return embedded()[0].generate(**inputs, **passing(cache), **options)


def text(tokens: int = 300, begin: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.tensor([demo.text_ids(embedded()[1])[begin : begin + tokens]], device="cuda")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.fixture
def compiling():
    """Nothing is compiled yet, and nothing made that kernels keep."""
    from qkvcache.kernels.host.tables import tables
    from qkvcache.kernels.store.triton_dequantize import rotation_table

    for kept in (dispatch.prepare, tables, rotation_table):
        kept.cache_clear()
    torch.compiler.reset()
    counters.clear()
    network, _ = embedded()
    network.__dict__.pop("_compiled_call", None)
    with torch.compiler.set_stance("default"):
        yield network
    torch.compiler.reset()


@pytest.mark.parametrize("format", ["identity", "int8", "nvfp4", FOUR_BIT])
def test_generate_replays_cuda_graphs(format, compiling):
    """By itself, with transformers' own compile config: the tokens of uncompiled steps from one graph, whatever cache and prompt. In fp32,
    so that compiled and uncompiled steps quantize alike."""
    compiling.float()
    try:
        make = lambda: CompressedCache(compiling.config, format=format, max_length=512)  # noqa: E731
        inputs, shorter = text(300), text(200, 1000)
        cache = make()
        got = generate(cache, inputs)
        assert cache.get_seq_length() == 349
        expected = generate(make(), inputs, disable_compile=True), generate(make(), shorter, disable_compile=True)
        assert counters["stats"]["unique_graphs"] == 1
        assert_alike(got, expected[0])
        cache.reset()
        assert_alike(generate(cache, shorter), expected[1])
        replays, replay = [], torch.cuda.CUDAGraph.replay
        with mock.patch.object(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(graph), replay(graph))):
            assert_alike(generate(make(), inputs), expected[0])
        assert len(replays) > 40
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
        assert counters["inductor"]["cudagraph_skips"] == 0
    finally:
        compiling.bfloat16()


def assert_alike(got, expected, least: int = 25):
    """The same tokens, `least` of them or more, until two have logits that differ by less than what inductor, which rounds elsewhere,
    changes."""
    assert got.sequences.shape == expected.sequences.shape
    differing = (got.sequences != expected.sequences).any(0).nonzero()
    steps = len(expected.logits)
    same = steps if not len(differing) else int(differing[0]) - (expected.sequences.shape[1] - steps)
    for ours, theirs in zip(got.logits[: same + 1], expected.logits[: same + 1], strict=True):
        assert_close(ours.float(), theirs.float(), 0.05)
    assert same >= least


def test_padded_batches_compiled(compiling):
    """Logits in fp32, since rows of a batch turn at close calls of their own."""
    compiling.float()
    try:
        ids = text(300)["input_ids"].repeat(3, 1)
        mask = torch.ones_like(ids)
        mask[1, :50] = mask[2, :120] = 0
        inputs = {"input_ids": ids * mask, "attention_mask": mask}
        make = lambda: CompressedCache(compiling.config, format="identity", max_length=400)  # noqa: E731
        expected = generate(make(), inputs, disable_compile=True)
        got = generate(make(), inputs)
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=0, atol=1e-3)
        assert counters["stats"]["unique_graphs"] == 1
    finally:
        compiling.bfloat16()


def test_a_turn_after_a_compiled_one(compiling):
    inputs, out = text(200), []
    for options in ({"disable_compile": True}, {}):
        cache = CompressedCache(compiling.config, format="int8", max_length=400)
        first = generate(cache, inputs, max_new_tokens=20, **options)
        assert cache.get_seq_length() == 219
        more = torch.cat([first.sequences, text(30, 2000)["input_ids"]], 1)
        out.append(generate(cache, {"input_ids": more}, max_new_tokens=20, disable_compile=True))
        assert cache.get_seq_length() == 269
    assert_alike(out[1], out[0], least=0)  # in bf16


def test_overrun_of_a_compiled_generate_is_refused(compiling):
    cache = CompressedCache(compiling.config, format=FOUR_BIT, max_length=320)
    with pytest.raises(ValueError, match="320 tokens and 1 more do not fit in max_length=320"):
        generate(cache, text(300))
    assert cache.get_seq_length() == 320
    cache.reset()
    generate(cache, text(300), max_new_tokens=21)  # the last of which is not stored
    assert cache.get_seq_length() == 320


# Memory


def commit() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def prefill(network, cache, ids: torch.Tensor, chunk: int) -> tuple[int, int]:
    """Bytes held after a prefill in chunks, less those held before it, and the same at the peak. They are the bytes that tensors ask
    for: a block of the allocator can be up to 1 MiB larger, by what was freed earlier."""
    commit()
    requested = "requested_bytes.all."
    before = torch.cuda.memory_stats()[requested + "current"]
    with torch.no_grad():
        for part in ids.split(chunk, 1):
            network.model(part, **passing(cache))
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return stats[requested + "current"] - before, stats[requested + "peak"] - before


@pytest.mark.parametrize("chunk", [8192, 1024], ids=["whole", "chunked"])
@pytest.mark.parametrize("format", [FOUR_BIT, "nvfp4"])
def test_a_prefill_peaks_below_dynamic_cache(format, chunk):
    network = on_gpu(torch.bfloat16)
    ids = prompt(4, 8192)["input_ids"]
    warm = CompressedCache(network.config, format=format, max_length=8192)
    for cache in (warm, DynamicCache(config=network.config)):  # libraries take their workspaces, kernels their tables
        prefill(network, cache, ids, chunk)
    del warm, cache
    dense, dense_peak = prefill(network, cache := DynamicCache(config=network.config), ids, chunk)
    del cache
    held, peak = prefill(network, cache := CompressedCache(network.config, format=format, max_length=8192), ids, chunk)
    assert peak < dense_peak and held < dense / 2.5
    assert held == pytest.approx(cache.nbytes, rel=0.01)


@pytest.mark.parametrize("format", FORMATS)
def test_steps_allocate_nothing_that_stays(format):
    network = on_gpu(torch.bfloat16)
    cache = CompressedCache(network.config, format=FORMATS[format], max_length=1000)
    ids = prompt(2, 920)["input_ids"]
    prefill(network, cache, ids[:, :900], 900)
    prefill(network, cache, ids[:, 900:904], 1)  # tables and workspaces
    held, _ = prefill(network, cache, ids[:, 904:], 1)
    assert held == 0
    storages = {x.data_ptr(): x.nbytes() for layer in cache.layers for x in (x.untyped_storage() for _, x in layer.tensors())}
    assert cache.nbytes == sum(storages.values())
