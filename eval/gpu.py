"""Tools that the benchmarks share: models of random weights, caches filled with random keys and values, and clocks."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

LLAMA = {
    "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 2**22,
}  # fmt: skip
"""The shape of Llama 3.1 8B."""
TINY = LLAMA | {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 64,
}  # fmt: skip
FILL = 2**27
"""The most elements that fill a layer at once."""


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def bf16(*shape: int) -> Tensor:
    """Random numbers."""
    return torch.randn(shape, device=device(), dtype=torch.bfloat16)


def gpu(name: str, *args) -> int:
    """The result of a function of `torch.cuda`, or 0 without a GPU."""
    return getattr(torch.cuda, name)(*args) or 0 if torch.cuda.is_available() else 0


def let_go() -> None:
    """Frees memory that nothing holds any more."""
    gc.collect()
    gpu("synchronize")
    gpu("empty_cache")
    gpu("reset_peak_memory_stats")


def random_llama(tiny: bool = False, on: str | torch.device | None = None, **shape) -> PreTrainedModel:
    """A Llama of random bf16 weights, made on the device; `shape`: what differs from `LLAMA`, or from `TINY`."""
    config = LlamaConfig(**(TINY if tiny else LLAMA) | shape, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    with torch.device(on or device()):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def fill(cache: Cache, config: PreTrainedConfig, rows: int, tokens: int, layers: int | None = None) -> None:
    """Fills a cache as a prompt would; each chunk is the same, and the first of a layer comes into an empty one."""
    heads, dim = config.num_key_value_heads, config.head_dim
    chunk = min(max(FILL // (rows * heads * dim), 1), tokens)
    key, value = (torch.randn(rows, heads, chunk, dim, device=device(), dtype=torch.bfloat16) for _ in range(2))
    for begin in range(0, tokens, chunk):
        count = min(chunk, tokens - begin)
        for layer in range(layers or config.num_hidden_layers):
            cache.update(key[:, :, :count], value[:, :, :count], layer)


def milliseconds(call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """The time of a call by the clock, the GPU's work included; `before` is not counted."""
    before()
    gpu("synchronize")
    begin = time.perf_counter()
    call()
    gpu("synchronize")
    return 1e3 * (time.perf_counter() - begin)


def sets_of(nbytes: int) -> int:
    """How many sets of `nbytes` are read in turn, so that none is in the L2 cache when it is read again: two or more, or a large one."""
    return 1 if nbytes > 2**31 else min(max(-(-(2**27) // nbytes), 2), 8)


def graph_us(calls: list[Callable[[], object]], replays: int = 10) -> float:
    """Median microseconds of one call on the GPU, from replays of a CUDA graph of about eight; without a GPU, the least by the clock."""
    if not torch.cuda.is_available():
        return 1e3 * min(map(milliseconds, calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph, rounds, times = torch.cuda.CUDAGraph(), max(1, 8 // len(calls)), []
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    for replay in range(replays + 2):
        elapsed = between_events(graph.replay)
        if replay > 1:
            times.append(elapsed / (rounds * len(calls)))
    return statistics.median(times)


def queued_us(call: Callable[[], object]) -> float:
    """Least microseconds of a call on the GPU, of a few that the host queues without waiting."""
    call()

    def calls() -> None:
        for _ in range(4):
            call()

    return min(between_events(calls, queued=True) for _ in range(3)) / 4


def between_events(call: Callable[[], object], queued: bool = False) -> float:
    """Microseconds between two events of the GPU around `call`; `queued`: the GPU waits before the first, so that the host is ahead."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if queued:
        torch.cuda._sleep(20_000_000)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3
