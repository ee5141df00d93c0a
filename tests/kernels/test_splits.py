"""How many splits rows have, and how these are joined: what took the least time in four formats, or 3 % more.

Rows "decode by splits", "decode by launch" and "joins" in `results/past.jsonl`."""

from __future__ import annotations

import pytest
import torch

from qkvcache.formats import REGISTRY
from qkvcache.kernels.attend.launches import in_one_wave, in_waves, programs_of, split
from qkvcache.kernels.attend.triton_join import joining

SCHEDULERS = 132 * 4
PLACES = 3 * SCHEDULERS
"""Programs that an H200 runs at a time, in most formats."""
BEST = {
    (128, 2048): (1, 3), (256, 512): (1, 1), (32, 4096): (4, 6), (64, 2048): (2, 3), (8, 32768): (16, 24), (2, 32768): (64, 64),
    (1, 32768): (64, 128), (1, 131072): (64, 128),
}  # fmt: skip
"""The best numbers of splits by rows and tokens: one where a scheduler runs two programs at a time, one where it runs three."""


@pytest.mark.parametrize(("each", "tile"), [(2, 64), (3, 32)])
@pytest.mark.parametrize(("rows", "tokens"), BEST)
def test_rows_have_the_splits_that_are_fastest(rows, tokens, each, tile):
    assert split(tokens, rows * 8, tile, each * SCHEDULERS, SCHEDULERS) == BEST[rows, tokens][each - 2]


@pytest.mark.parametrize("groups", [1, 7, 64, 512, 1584, 5000])
@pytest.mark.parametrize("tokens", [1, 100, 513, 32768, 2**22])
def test_splits_are_whole_tiles_that_cover_all_tokens(tokens, groups):
    for count, most in (split(tokens, groups, 64, PLACES, SCHEDULERS), 132), (in_one_wave(tokens, groups, 64, PLACES), 100):
        each = -(-tokens // count)
        assert 1 <= count <= most and (count == 1 or each >= 128 - 64)
        assert (in_one_wave(tokens, groups, 64, PLACES) + 1) * groups <= max(PLACES, 2 * groups)


@pytest.mark.parametrize(
    ("groups", "splits"), [(1, 86), (16, 8), (32, 4), (48, 8), (80, 3), (128, 1), (144, 8), (160, 4), (256, 1), (1024, 1)]
)
def test_programs_that_fill_a_multiprocessor(groups, splits):
    assert in_waves(32768, groups, 128, 132) == splits


@pytest.mark.parametrize(
    ("rows", "channels", "rotated", "launch"),
    [
        (8192, 128, True, (4, 128, 1)), (1024, 128, False, (4, 128, 1)), (256, 128, True, (32, 128, 1)), (32, 128, True, (128, 128, 4)),
        (32, 128, False, (128, 32, 1)), (1024, 512, True, (4, 512, 2)), (128, 512, True, (32, 512, 4)), (128, 512, False, (8, 128, 1)),
    ],
)  # fmt: skip
def test_joins(rows, channels, rotated, launch):
    found = joining(rows, channels, rotated)
    assert (found["S"], found["C"], found["num_warps"]) == launch


@pytest.mark.parametrize(("format", "each"), [("int8", 6), ("turboquant_4bit_nc", 8), ("nvfp4", 12)])
def test_programs_that_run_at_a_time(format, each):
    codecs = REGISTRY[format].codecs()
    assert programs_of(codecs, 128, torch.device("cpu")) == 4 * each
