"""`append_and_evict`: afterwards the region holds the tokens of highest priority, and each slot the codes of the token recorded there."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkvcache.evict.eviction import append_and_evict
from qkvcache.evict.metadata import TokenMetadata, no_tokens
from qkvcache.evict.slot_pages import SlotPages
from qkvcache.evict.tail import Tail
from qkvcache.formats import resolve
from qkvcache.policies import H2O, Budget
from tests.matrix import FORMATS

pytestmark = pytest.mark.sums

ROWS, HEADS, DIM = 3, 2, 32
POLICY = H2O(budget=10**6, recent=0, reduce="sum")

arrivals = st.lists(st.tuples(st.integers(1, 70), st.integers(0, 40)), min_size=1, max_size=6)  # tokens, and room that is added
seeds = st.integers(0, 10**6)


class QuantizedRegion:
    """A region, and every token that was ever offered to it."""

    def __init__(self, format: str, seed: int):
        codec = FORMATS[format].key
        self.codec, self.generator = codec, torch.Generator().manual_seed(seed)
        empty = torch.empty(ROWS, HEADS, 0, DIM)
        self.slots = SlotPages((codec, codec), (empty, empty))
        self.metadata = TokenMetadata(POLICY, Budget(10**6), Tail((empty, empty), no_tokens(POLICY, empty)))
        self.metadata.padding = torch.zeros(ROWS, dtype=torch.int64)
        self.x = [[] for _ in range(ROWS)]  # the tokens of each row by position
        self.tokens = [[[] for _ in range(HEADS)] for _ in range(ROWS)]  # (score, position) of what is held

    def offer(self, count: int, limit: int, share: float, own: torch.Tensor | None) -> None:
        x = torch.randn(ROWS, HEADS, count, DIM, generator=self.generator)
        is_valid = torch.rand(ROWS, count, generator=self.generator) >= share
        positions = (
            torch.where(is_valid, self.metadata.row_lengths[:, None] + is_valid.cumsum(-1) - 1, -1).int()[:, None].expand(-1, HEADS, -1)
        )
        score = torch.randint(0, 6, (ROWS, HEADS, count), generator=self.generator).float()  # ties
        self.metadata.columns += count
        self.metadata.padding = self.metadata.padding + (count - is_valid.sum(-1))
        for row in range(ROWS):
            self.x[row] += [x[row, :, i] for i in range(count) if is_valid[row, i]]
            for head in range(HEADS):
                union = self.tokens[row][head] + [
                    (float(score[row, head, i]), int(positions[row, head, i])) for i in range(count) if is_valid[row, i]
                ]
                self.tokens[row][head] = sorted(union)[max(len(union) - (limit if own is None else min(int(own[row]), limit)), 0) :]
        append_and_evict(self.slots, self.metadata, (x, -x), {"positions": positions, "score": score}, limit, own)

    def check(self, limit: int) -> None:
        region = self.metadata.region
        assert self.slots.length == region["positions"].shape[-1] <= limit
        empty = region["positions"] < 0
        assert (empty == empty[:, :1]).all()  # the same in all heads: the mask has one
        for row in range(ROWS):
            for head in range(HEADS):
                pairs = zip(region["score"][row, head].tolist(), region["positions"][row, head].tolist(), strict=True)
                assert sorted(pair for pair in pairs if pair[1] >= 0) == self.tokens[row][head]
        for side, sign in enumerate((1, -1)):
            self.check_codes(side, sign, region["positions"])

    def check_codes(self, side: int, sign: int, positions: torch.Tensor) -> None:
        """Bit for bit: a token has the same codes alone as in a batch, though they decode to other last places there."""
        blocks = [packed.codes for packed in self.slots.packed(side, 50)]
        for row in range(ROWS):
            if not blocks or not self.x[row]:
                continue
            x = sign * torch.stack(self.x[row], dim=1)[None]
            statistics = {name: kept[row : row + 1] for name, kept in self.slots.statistics[side].items()}
            alone = self.codec.quantize(x, statistics)
            at = positions[row].long()
            for name, codes in alone.items():
                held = torch.cat([block[name] for block in blocks], dim=2)[row]
                expected = codes[0].expand(HEADS, -1, -1).gather(1, at.clamp_min(0)[..., None].expand(-1, -1, codes.shape[-1]))
                assert torch.equal(held[at >= 0], expected[at >= 0]), name


@pytest.mark.parametrize("format", ["identity", "int8_token", "turboquant_k3v4_nc"])
@settings(max_examples=25)
@given(arrivals, seeds, st.sampled_from([0.0, 0.5]))
def test_the_best_are_held_and_slots_are_true(format, arrivals, seed, padding):
    region, limit = QuantizedRegion(format, seed), 0
    for count, more in arrivals:
        limit += more
        region.offer(count, limit, padding, None)
        region.check(limit)


@pytest.mark.parametrize("format", ["int8"])
@settings(max_examples=25)
@given(arrivals, seeds, st.sampled_from([0.0, 0.5]), st.lists(st.floats(0, 1), min_size=ROWS, max_size=ROWS))
def test_rows_of_different_budgets(format, arrivals, seed, padding, shares):
    region, limit = QuantizedRegion(format, seed), 0
    for count, more in arrivals:
        limit += more
        own = torch.tensor([int(share * limit) for share in shares])[:, None, None]
        region.offer(count, limit, padding, own)
        region.check(limit)


def test_grown_slots_hold_numbers():
    codec, like = resolve("turboquant_3bit_nc").value, torch.empty(ROWS, HEADS, 1, DIM)
    slots = SlotPages((codec, codec), (like, like))
    slots.reserve(70)
    slots.count(70)
    assert slots.length == 70
    assert all(codec.dequantize(packed.codes, DIM).isfinite().all() for side in (0, 1) for packed in slots.packed(side, 64))
