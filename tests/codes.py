"""The codes that a storage holds, in token order."""

from torch import Tensor, cat

from qkvcache.storage import RowPages


def codes_of(tokens: RowPages, side: int | None = None) -> list[Tensor]:
    """Planes `[B, H', T, width]` of keys (0), of values (1), or of both: copies."""
    found = []
    for each in (0, 1) if side is None else (side,):
        parts = list(tokens.packed(each, 2**30))
        for name in parts[0].codes.keys() - tokens.statistics[each].keys() if parts else ():
            found.append(cat([part.codes[name] for part in parts], dim=2))
    return found
