"""Requests on a tiny model: through continuous batching, and one after another with a cache."""

from __future__ import annotations

import functools
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from qkvcache import CompressedCache
from qkvcache.releases import passing
from tests.matrix import MODELS, model
from tests.releases import BATCHING
from tests.seeds import SEED

if not BATCHING:
    pytest.skip("continuous batching needs transformers 5.24", allow_module_level=True)

from qkvcache.batching import attention, store  # noqa: E402, F401
from qkvcache.batching.transformers import manager as batching_manager  # noqa: E402, F401

ZONES = {"num_sink_tokens": 2, "residual_length": 4}
NEW = 12
"""Tokens that a request generates."""
LENGTHS = (70, 5, 140, 1, 130)
"""Of prompts: less and more than a page, and less than the exact tokens."""


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(SEED + seed)
    return [torch.randint(3, 100, (length,), generator=generator).tolist() for length in lengths]


def pool(blocks: int = 40, **options):
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    return ContinuousBatchingConfig(**{"page_size": 64, "num_blocks": blocks, "max_batch_tokens": 512} | options)


def greedy(new: int = NEW) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)


@contextmanager
def serving(network, new: int = NEW, **options):
    """A running manager, within `continuous_batching`."""
    manager = network.init_continuous_batching(generation_config=greedy(new), continuous_batching_config=pool(**options))
    manager.warmup()
    manager.start()
    try:
        yield manager
    finally:
        manager.stop()


PATIENCE = 600
"""Seconds until what does not happen is a failure. No test passes or fails by the speed of the machine."""


def until(condition) -> bool:
    """Waits until it holds; False if it never does."""
    end = time.monotonic() + PATIENCE
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return holds


@contextmanager
def listening(server, run=None):
    """`server` serves in a thread."""
    thread = threading.Thread(target=run or server.run, daemon=True)
    thread.start()
    assert until(lambda: server.server.started or not thread.is_alive()) and thread.is_alive()
    try:
        yield
    finally:
        server.server.should_exit = True
        thread.join(PATIENCE)


@contextmanager
def waiting(network):
    """The first step waits until the block ends, so that what is added within it runs together, however fast the machine is."""
    added = threading.Event()

    def wait(*_) -> None:
        added.wait(PATIENCE)

    hook = network.register_forward_pre_hook(wait)
    try:
        yield
    finally:
        added.set()
        hook.remove()


def collect(manager, names: list[str]) -> dict:
    """The outputs of these requests."""
    found, deadline = {}, time.monotonic() + PATIENCE
    while len(found) < len(names):
        assert time.monotonic() < deadline and manager.is_running()
        if (output := manager.get_result(timeout=1)) and output.is_finished() and output.request_id in names:
            found[output.request_id] = output
    return found


def answers(manager, ids: list[list[int]]) -> list[list[int]]:
    """Tokens of requests that run together."""
    names = manager.add_requests(ids)
    found = collect(manager, names)
    assert [found[name].error for name in names] == [None] * len(ids)
    return [found[name].generated_tokens for name in names]


def watch_offloading(manager) -> dict[str, torch.Tensor]:
    """Asserts that blocks come back from the host as they left; returns what left, by request."""
    offloading, moved = manager.batch_processor.offloading_manager, {}
    offload, restore = offloading._offload_to_cpu, offloading.restore_scheduled_requests

    def content(blocks: list[int]) -> torch.Tensor:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return manager.cache.allocators[0]._copy_view[blocks].clone()

    def leaving(victims, tables):
        found = offload(victims, tables)
        moved.update({name: content(tables[name]["full_attention"]) for name in found})
        return found

    def returning(batch):
        names = [future.state.request_id for future in batch if future.state.is_cpu_offloaded]
        restore(batch)
        for name in names:
            assert torch.equal(content(manager.cache.allocators[0].block_table[name])[: len(moved[name])], moved[name])

    offloading._offload_to_cpu, offloading.restore_scheduled_requests = leaving, returning
    return moved


def single(network, ids: list[int], format, new: int = NEW, chunk: int | None = None, cache=None, **zones) -> tuple[list[int], list[float]]:
    """Tokens of one prompt, read in chunks, with a cache; and by how much the logit of each exceeds the next one, relative to the largest
    logit."""
    cache = CompressedCache(network.config, format=format, **ZONES | zones) if cache is None else cache
    given, tokens, margins = list(ids), [], []
    with torch.no_grad():
        for _ in range(new):
            for begin in range(0, len(given), chunk or len(given)):
                part = torch.tensor([given[begin : begin + (chunk or len(given))]], device=network.device)
                logits = network(part, **passing(cache)).logits[0, -1]
            first, second = logits.topk(2).values.tolist()
            margins.append((first - second) / logits.abs().max().item())
            given = [int(logits.argmax())]
            tokens += given
    return tokens, margins


CLOSE = 1e-3
"""A margin that the rounding of another order of sums, and the code that it may turn, can exceed."""


def assert_same(got: list[int], expected: tuple[list[int], list[float]]) -> int:
    """The same tokens, until two of them are as likely as each other; returns how many were compared."""
    tokens, margins = expected
    decided = next((i for i, margin in enumerate(margins) if margin < CLOSE), len(margins))
    assert got[:decided] == tokens[:decided]
    assert len(got) == len(tokens)
    return decided


def llama():
    return model("llama")


@functools.lru_cache
def tiniest():
    """A model of one layer, for many requests."""
    config = MODELS["llama"]()
    config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.head_dim = 1, 16, 16, 16
    config.num_attention_heads, config.num_key_value_heads = 2, 1
    torch.manual_seed(SEED)
    return AutoModelForCausalLM.from_config(config).eval()
