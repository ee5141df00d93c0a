"""Streams of any length: sinks and a window, at their own places or at those of the cache."""

import functools

import pytest
import torch
import transformers as hf

from qkvcache import SinkCache
from qkvcache.releases import passing
from tests.evict.test_eviction import check_rows
from tests.reference import assert_close
from tests.seeds import SEED
from tests.tolerance import of_angles, of_model


def say(cache, ids, network):
    with torch.no_grad():
        return network(ids, **passing(cache)).logits


def one_layer():
    config = hf.LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        initializer_range=0.2, pad_token_id=0, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(SEED)
    return hf.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(("positions", "format", "length"), [("cache", None, 420), ("original", None, 120), ("cache", "int8", 120)])
def test_streams_read_sinks_and_window_at_their_places(positions, format, length):
    """In one layer keys depend on token and place only: a step is a plain forward of sinks, window and token. Up to 400 evictions."""
    network, sinks, window = one_layer(), 3, 9
    cache = SinkCache(network.config, window_length=window, num_sink_tokens=sinks, positions=positions, format=format, residual_length=4)
    ids = torch.randint(3, 100, (1, length), generator=torch.Generator().manual_seed(SEED + 1))
    say(cache, ids[:, :20], network)
    for t in range(20, length):
        logits = say(cache, ids[:, t : t + 1], network)[:, -1]
        if t < 25 or t % 100 == 19:
            places = torch.tensor([*range(sinks), *range(t - window, t + 1)])
            at = torch.arange(len(places)) if positions == "cache" else places
            with torch.no_grad():
                expected = network(ids[:, places], position_ids=at[None]).logits[:, -1]
            turned = of_angles(t) if positions == "cache" else 0
            assert_close(logits, expected, 2e-2 if format else of_model(network) + turned)
    assert cache.kept_positions()[0, 0].tolist() == [*range(sinks), *range(length - window, length)]


def test_padded_rows_turn_by_their_own_gap():
    network = one_layer()
    make = functools.partial(SinkCache, network.config, window_length=9, num_sink_tokens=3, positions="cache")
    check_rows(network, make, (12, 8, *[1] * 17))
