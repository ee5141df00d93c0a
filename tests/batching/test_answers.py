"""Requests together answer as each alone, and as single `generate` with the same cache."""

from __future__ import annotations

import pytest

from qkvcache import continuous_batching
from qkvcache.formats import REGISTRY
from tests.matrix import FORMATS, slowly

from .requests import LENGTHS, ZONES, answers, assert_same, llama, prompts, serving, single

TOKENWISE = [name for name in FORMATS if all(c.packed_layout is None or c.packed_layout.writable for c in REGISTRY[name].codecs())]
"""Formats whose scales do not span tokens."""
pytestmark = pytest.mark.filterwarnings("ignore:continuous batching on compressed pages")


@pytest.mark.parametrize("format", slowly(TOKENWISE, ["identity", "int8", "turboquant_4bit_nc", "hadaquant_k3v3"]))
def test_alone_together_and_single(format):
    """The first request alone, whose prompt the statistics come from, equals a cache; the others alone equal all together."""
    network, ids = llama(), prompts(*LENGTHS)
    with continuous_batching(network, format, **ZONES), serving(network, allow_block_sharing=False) as manager:
        alone = [answers(manager, [one])[0] for one in ids]
        assert answers(manager, ids) == alone
    assert assert_same(alone[0], single(network, ids[0], format))
    with continuous_batching(network, format, num_sink_tokens=0, residual_length=0), serving(network) as manager:
        (bare,) = answers(manager, ids[:1])
    assert assert_same(bare, single(network, ids[0], format, num_sink_tokens=0, residual_length=0))
