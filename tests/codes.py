"""The codes that a storage holds, in token order; and planes for codes."""

from torch import Tensor, cat

from qkvcache.formats import Codec
from qkvcache.storage import RowPages


def codes_of(tokens: RowPages, side: int | None = None) -> list[Tensor]:
    """Planes `[B, H', T, width]` of keys (0), of values (1), or of both: copies."""
    found = []
    for each in (0, 1) if side is None else (side,):
        parts = list(tokens.packed(each, 2**30))
        for name in parts[0].codes.keys() - tokens.statistics[each].keys() if parts else ():
            found.append(cat([part.codes[name] for part in parts], dim=2))
    return found


def planes_of(codec: Codec, like: Tensor, tokens: int, per_head: bool = False) -> dict[str, Tensor]:
    """Zeros for the codes of `tokens` tokens like `like` `[B, H, T, D]`; `per_head`: heads share no buffer."""
    buffers = [buffer for buffer in codec.buffers(like.shape[3]) if buffer.tokens == "each"]
    heads = {buffer.name: like.shape[1] if per_head or buffer.heads == "each" else 1 for buffer in buffers}
    return {b.name: like.new_zeros(like.shape[0], heads[b.name], tokens, b.width, dtype=b.dtype) for b in buffers}
