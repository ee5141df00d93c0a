"""Storing several exact tokens in the sinks and the residual of storage that counts on the device, in plain torch."""

from __future__ import annotations

from .segments import Buffers, Pair


def store_exact(buffers: Buffers, exact: Pair, sinks: tuple[int, int], begin: int, slot: int, lengths: tuple[int, int]) -> None:
    """Copies exact tokens, keys and values `[B, H, T, D]` each, into the storage and sets its counts on the device.

    Args:
        sinks: which of the `T` tokens are new sinks: the first, and the one after the last.
        begin: the first token that is copied into the ring; all later ones are, too. The ring has room for them.
        slot: the slot of the ring for token `begin`.
        lengths: tokens and quantized tokens of each row afterwards, the same for all rows.
    """
    for x, first, ring in zip(exact, buffers.sinks, buffers.residual, strict=True):
        if sinks[0] < sinks[1]:
            first[:, :, sinks[0] : sinks[1]] = x[:, :, sinks[0] : sinks[1]]
        middle = min(begin + ring.shape[2] - slot, x.shape[2])  # the first token that is at the beginning of the ring
        ring[:, :, slot : slot + middle - begin] = x[:, :, begin:middle]
        if middle < x.shape[2]:
            ring[:, :, : x.shape[2] - middle] = x[:, :, middle:]
    for column, length in enumerate(lengths):
        buffers.lengths[:, column].fill_(length)
