"""A decode step's new tokens into preallocated storage, in one launch that needs no number from the host: what `store.step` computes.

A program takes a tile of new tokens (times heads) of one side. Each takes its place in the ring, and the token that was there is encoded
into the body by the same program. The last program to finish moves the counts on: by then all have read them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .store import Store
from .triton_decode import known, padded, plane_arguments, table_of, tile
from .triton_encode import store_tile, tile_of


def step_kv(store: Store, x: tuple[Tensor, Tensor]) -> None:
    """Takes up to as many tokens as the ring holds, `[B, H, T, D]`; codecs must be those that `triton_encode.supports`."""
    arguments: list[object] = []
    constants: list[object] = []
    specs = [known(codec, new) for codec, new in zip(store.codecs, x, strict=True)]
    batch, heads, tokens, _ = x[0].shape
    for side, (spec, new) in enumerate(zip(specs, x, strict=True)):
        ring, first, head_dim = store.ring[side], store.first[side], new.shape[3]
        planes = plane_arguments(spec, store.planes[side] | store.once[side], new)
        arguments += [new, *new.stride()[:3], ring, *ring.stride()[:2], first, *first.stride()[:2], table_of(spec, new), *planes]
        constants += [*spec.constants, head_dim, padded(head_dim)]
    across, along, warps = tile(specs, heads, tokens, max(padded(new.shape[3]) for new in x), x[0].element_size())
    grid = (triton.cdiv(tokens, along) * triton.cdiv(heads, across), batch, 2)
    sizes = store.first[0].shape[2], store.ring[0].shape[2], store.limit
    with torch.cuda.device_of(x[0]):
        _step_kernel[grid](*arguments, store.state, *sizes, tokens, heads, *constants, across, along, num_warps=warps)


@triton.jit
def _step_side(
    x, xb, xh, xt, ring, rb, rh, first, fb, fh, table, codes, cb, ch, high, hb, hh, scales, sb, sh, center, eb, eh,
    seen, body, fits, first_slots, ring_slots, tokens, heads,
    KIND: tl.constexpr, OPTION: tl.constexpr, ROTATION: tl.constexpr, SPAN: tl.constexpr, CENTERED: tl.constexpr,
    D: tl.constexpr, P: tl.constexpr, ACROSS: tl.constexpr, ALONG: tl.constexpr,
):  # fmt: skip
    b, h0, t0 = tile_of(heads, ACROSS, ALONG)
    i = tl.arange(0, ACROSS * ALONG)
    c = tl.arange(0, P)[None, :]
    h = (h0 + i % ACROSS).to(tl.int64)
    t = t0 + i // ACROSS
    opening = tl.minimum(tl.maximum(first_slots - seen, 0), tokens)  # of the new tokens, those for the first zone
    held = seen - tl.minimum(seen, first_slots) - body
    rank = t - opening
    live = (t < tokens) & (h < heads) & fits
    leaves = live & (rank + held >= ring_slots)
    place = ring + b * rb + h * rh + (body + held + tl.maximum(rank, 0)) % ring_slots * D
    old = tl.load(place[:, None] + c, mask=leaves[:, None] & (c < D), other=0.0)
    store_tile(
        old, leaves, b, h0, body + held + t0 - opening - ring_slots, table, codes, cb, ch, high, hb, hh, scales, sb, sh, center, eb, eh,
        KIND, OPTION, ROTATION, SPAN, CENTERED, D, P, ACROSS, ALONG,
    )  # fmt: skip
    new = tl.load(x + (b * xb + h * xh + t.to(tl.int64) * xt)[:, None] + c, mask=live[:, None] & (c < D), other=0.0)
    tl.debug_barrier()  # before what others of this program have read is overwritten
    tl.store(place[:, None] + c, new, mask=(live & (rank >= 0))[:, None] & (c < D))
    start = first + b * fb + h * fh + (seen + t) * D
    tl.store(start[:, None] + c, new, mask=(live & (rank < 0))[:, None] & (c < D))


@triton.jit(do_not_specialize=["first_slots", "ring_slots", "limit", "tokens", "heads"])
def _step_kernel(
    kx, kxb, kxh, kxt, kring, krb, krh, kfirst, kfb, kfh, ktable, kcodes, kcb, kch, khigh, khb, khh, kscales, ksb, ksh, kcenter, keb, keh,
    vx, vxb, vxh, vxt, vring, vrb, vrh, vfirst, vfb, vfh, vtable, vcodes, vcb, vch, vhigh, vhb, vhh, vscales, vsb, vsh, vcenter, veb, veh,
    state, first_slots, ring_slots, limit, tokens, heads,
    KKIND: tl.constexpr, KOPTION: tl.constexpr, KROTATION: tl.constexpr, KSPAN: tl.constexpr, KCENTERED: tl.constexpr,
    KD: tl.constexpr, KP: tl.constexpr,
    VKIND: tl.constexpr, VOPTION: tl.constexpr, VROTATION: tl.constexpr, VSPAN: tl.constexpr, VCENTERED: tl.constexpr,
    VD: tl.constexpr, VP: tl.constexpr,
    ACROSS: tl.constexpr, ALONG: tl.constexpr,
):  # fmt: skip
    seen = tl.load(state)
    body = tl.load(state + 1)
    fits = seen + tokens <= limit
    if tl.program_id(2) == 0:
        _step_side(
            kx, kxb, kxh, kxt, kring, krb, krh, kfirst, kfb, kfh, ktable, kcodes, kcb, kch, khigh, khb, khh,
            kscales, ksb, ksh, kcenter, keb, keh, seen, body, fits, first_slots, ring_slots, tokens, heads,
            KKIND, KOPTION, KROTATION, KSPAN, KCENTERED, KD, KP, ACROSS, ALONG,
        )  # fmt: skip
    else:
        _step_side(
            vx, vxb, vxh, vxt, vring, vrb, vrh, vfirst, vfb, vfh, vtable, vcodes, vcb, vch, vhigh, vhb, vhh,
            vscales, vsb, vsh, vcenter, veb, veh, seen, body, fits, first_slots, ring_slots, tokens, heads,
            VKIND, VOPTION, VROTATION, VSPAN, VCENTERED, VD, VP, ACROSS, ALONG,
        )  # fmt: skip
    tl.debug_barrier()
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    last = tl.atomic_add(state + 2, 1, sem="acq_rel") == programs - 1
    leaving = tl.maximum(seen + tokens - first_slots - body - ring_slots, 0)
    tl.store(state, tl.where(fits, seen + tokens, seen), mask=last)
    tl.store(state + 1, tl.where(fits, body + leaving, body), mask=last)
    tl.store(state + 2, 0, mask=last)
    dropped = tl.load(state + 3, mask=last, other=0)
    tl.store(state + 3, tl.where(fits, dropped, dropped + tokens), mask=last)
