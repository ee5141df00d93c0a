"""How many splits rows have: the number took the least time in four formats, or 3 % more (`results/past.jsonl`, "decode by splits")."""

from __future__ import annotations

import pytest

from qkvcache.kernels.attend.launches import in_one_wave, in_waves, split

PLACES = 132 * 12
"""Programs that an H200 runs at a time."""
BEST = {(128, 2048): 3, (256, 512): 1, (32, 4096): 6, (64, 2048): 3, (8, 32768): 24}


@pytest.mark.parametrize(("rows", "tokens"), BEST)
def test_rows_have_the_splits_that_are_fastest(rows, tokens):
    assert split(tokens, rows * 8, 32, PLACES) == BEST[rows, tokens]


@pytest.mark.parametrize("groups", [1, 7, 64, 512, 1584, 5000])
@pytest.mark.parametrize("tokens", [1, 100, 513, 32768])
def test_splits_are_whole_tiles_that_cover_all_tokens(tokens, groups):
    for count in split(tokens, groups, 64, PLACES), in_one_wave(tokens, groups, 64, PLACES):
        each = -(-tokens // count)
        assert 1 <= count <= 100 and (count == 1 or each >= 128 - 64)
        assert (in_one_wave(tokens, groups, 64, PLACES) + 1) * groups <= max(PLACES, 2 * groups)


@pytest.mark.parametrize(
    ("groups", "splits"), [(1, 86), (16, 8), (32, 4), (48, 8), (80, 3), (128, 1), (144, 8), (160, 4), (256, 1), (1024, 1)]
)
def test_programs_that_fill_a_multiprocessor(groups, splits):
    assert in_waves(32768, groups, 128, 132) == splits
