"""A step that reads prompts: how many kernels a layer launches, and pasts that do not fit into the scratch."""

from __future__ import annotations

import pytest
import torch
from transformers import CompileConfig

from qkvcache import continuous_batching
from qkvcache.formats import Int8
from tests.launches import counted
from tests.matrix import model

from .requests import ZONES, answers, assert_same, attention, greedy, llama, prompts, serving, single, store
from .requests import batching_manager as manager
from .requests import pool as pool_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def steps(patch: pytest.MonkeyPatch, format: str, ids: list[list[int]], **options) -> list[tuple[int, int, list[str]]]:
    """Of each step with prompts: how many chunks of prompts it has without and with a past, and what a layer launches."""
    patch.setenv("QKVCACHE_KERNELS", "triton")
    real, varlen, found = attention.paged_attention, attention.varlen_attention, []

    def watched(module, query, key, *args, block_table=None, **kwargs):
        store, layer = key.place
        step = store.step_of(layer, block_table, query.shape[2])
        with counted(patch) as launches:

            def one(*args, **kwargs):
                with launches.one("attention"):
                    return varlen(*args, **kwargs)

            patch.setattr(attention, "varlen_attention", one)
            out = real(module, query, key, *args, block_table=block_table, **kwargs)
        if step.chunks and layer == 1:
            pasts = [past for chunks in step.chunks for past in chunks.batch.past.tolist()]
            found.append((sum(not past for past in pasts), sum(past > 0 for past in pasts), launches.names))
        return out

    patch.setattr(manager, "paged_attention", watched)
    network = model("llama", layers=2)
    with continuous_batching(network, format, **ZONES), serving(network, new=3, **options) as running:
        answers(running, ids)
    return found


ATTENDS, DECODES = 3, 3
"""Launches of prompts (attention, a copy of its output, and one that stores the new tokens), and of requests that decode beside them."""


def test_prompts_are_read_together(monkeypatch):
    """However many prompts, and pasts of prompts, there are: one launch that gathers the pasts, one call of attention, and one launch that
    stores the new tokens."""
    begin = prompts(128)[0]
    first = [begin, *prompts(5, 20, 9, seed=1)]
    shared = [begin + more for more in prompts(30, 7, seed=2)]
    found = steps(monkeypatch, Int8(center=False), [*first, *shared], max_batch_tokens=170)
    for _, late, names in found:
        assert len(names) - (late > 0) in (ATTENDS, ATTENDS + DECODES) and names.count("attention") == 1, names
    assert max(new for new, _, _ in found) > 2 and max(late for _, late, _ in found) > 1
    assert any(new and late for new, late, _ in found)


def test_a_past_that_does_not_fit_into_the_scratch(monkeypatch):
    """Is dequantized in pieces; the prompt has the answer that it has alone."""
    network, ids, pieces = llama(), prompts(230), []
    pages = attention.attend_chunked_pages
    monkeypatch.setattr(attention, "attend_chunked_pages", lambda *args, **kwargs: (pieces.append(args[3]), pages(*args, **kwargs))[1])
    per_token = 2 * network.config.num_key_value_heads * network.config.head_dim * 4
    monkeypatch.setattr(store, "CHUNK_BYTES", 100 * per_token)
    with continuous_batching(network, Int8(center=False), **ZONES), serving(network, max_batch_tokens=30) as running:
        (got,) = answers(running, ids)
    assert pieces and min(pieces) > 60
    assert assert_same(got, single(network, ids[0], Int8(center=False), chunk=30))


def test_what_kernels_keep_follows_the_statistics(monkeypatch):
    """A prompt that warms up is read before there are statistics; later prompts are not read with its mean."""
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    network, (ids,) = model("llama", layers=1), prompts(150)
    with continuous_batching(network, "turboquant_4bit_nc", **ZONES):
        running = network.init_continuous_batching(generation_config=greedy(4), continuous_batching_config=pool_of(max_batch_tokens=64))
        running.warmup()
        running.cache.store.calibrating = False
        running.batch_processor.model_runner.run_one_warmup(network, 64, 64)
        assert all("gather" in launches for launches in running.cache.store.launches.values())
        running.cache.store.calibrating = True
        running.cache.reset()
        running.start()
        (got,) = answers(running, [ids])
        running.stop()
    monkeypatch.setenv("QKVCACHE_KERNELS", "torch")
    assert assert_same(got, single(network, ids, "turboquant_4bit_nc", new=4, chunk=64))


def test_layers_share_their_compiled_code():
    """However many there are. They have the answers of layers that are not compiled; afterwards they are not any more."""
    ids, counts = prompts(60, 36), []

    def backend(graph, inputs):
        counts[-1] += 1
        return graph.forward

    for layers in (1, 2):
        network, found = model("llama", layers=layers), []
        torch.compiler.reset()
        counts.append(0)
        for options in ({}, {"varlen_compile_config": CompileConfig(backend=backend, dynamic=True, mode=None)}):
            with (
                torch.compiler.set_stance("default"),
                continuous_batching(network, Int8(center=False), **ZONES),
                serving(network, new=1, max_batch_tokens=48, **options) as running,
            ):
                found.append(answers(running, ids))
        assert found[0] == found[1]
        assert not any(layer._compiled_call_impl for layer in manager.decoder_layers(network))
    assert counts[0] == counts[1] > 0


def test_keywords_that_pages_do_not_know_are_refused():
    key = attention.NewKV((None, 0), torch.zeros(1, 1, 1, 8))  # type: ignore[arg-type]
    for name in ("position_bias", "block_indices", "sinks"):
        with pytest.raises(NotImplementedError, match=f"Identity calls attention with {name}"):
            attention.paged_attention(torch.nn.Identity(), key.tensor, key, key, use_cache=True, **{name: 1})
