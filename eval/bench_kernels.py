"""Speed of the Triton kernels on one GPU, every format beside bf16 SDPA of the same run.

    python eval/bench_kernels.py [--check] [--quick]     measure, print a table, write eval/results/kernels.jsonl
    python eval/bench_kernels.py --tune                  launch sizes at 8x32768; writes nothing
    python eval/bench_kernels.py --markdown | --plot     the table of the documentation | kernels.png, from the rows: needs no GPU

GPU time, by replays of a CUDA graph over two payloads in turn, together larger than the L2 cache (one, where one exceeds 2 GB); medians.
Ratio: time of the better of flash and cuDNN attention on as many bf16 tokens / time of `attend_pages`, whole: its reduction, and 4 + 96
exact tokens on top. Floor ratio: bytes of those bf16 tokens / bytes of the codes. Codes are random bytes; `--check` compares real ones.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu import graph_us
from harness import Table, parser_of, picture, replace_rows, run_or_show
from palette import UNCENTERED, format_color
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from qkvcache.evict.observe import observe_pages, sum_attention
from qkvcache.evict.prefill import prefill_with_lse
from qkvcache.evict.sum_attention import attend_observed
from qkvcache.formats import REGISTRY, Buffer, Codec, HadaQuant, Int8
from qkvcache.formats.fp8 import ScaledFloat8
from qkvcache.kernels.pages import AttentionInputs
from qkvcache.storage import RowPages, attention_inputs_of

if importlib.util.find_spec("triton"):
    from qkvcache.kernels.attend import launches as fused
    from qkvcache.kernels.attend import plan
    from qkvcache.kernels.store.triton_dequantize import dequantize_pages
    from qkvcache.kernels.store.triton_store import quantize_into

KNOWN = REGISTRY | {"hadaquant_k4v4": HadaQuant(4, 4), "int8_halves": Int8(halves=True)}
"""The format in halves is not registered: caches choose it where upper halves are read alone."""
TURBO = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
HADA = ("hadaquant_k4v4", "hadaquant_k4v3", "hadaquant_k3v3", "hadaquant_k3v2", "hadaquant_k2v2")
FORMATS = ("identity", "int8", "fp8", TURBO[0], "nvfp4", "int4", "int4_vllm", *TURBO[1:], *HADA)
FEW = ("int8", "nvfp4", "turboquant_4bit_nc", "turboquant_3bit_nc")
TWO = ("int8", "turboquant_4bit_nc")
CASES = ((8, 32768), (8, 131072), (1, 32768), (32, 4096))
SHAPES = ((32, 8, 64), (32, 32, 128), (64, 8, 128))  # query heads, KV heads, head_dim
TUNED = tuple(itertools.product((32, 64), (2, 3), (None, 168), (8, 12, 24)))  # Launch(tile, stages, registers, programs)
TWO_GB = 2**31
"""Ends the names of rows measured without a mean of keys; not each of these formats is registered."""


def filled(name: str, batch: int, heads: int, tokens: int, dim: int) -> RowPages:
    """Pages of random codes that decode to finite numbers, as storage allocates them."""
    format = KNOWN[name]
    like = torch.empty(batch, heads, 0, dim, device="cuda", dtype=torch.bfloat16)
    pages = RowPages((format.key, format.value), (like, like))
    pages.reserve(tokens)
    pages.length, pages.calibrated = tokens, True
    slots = pages.pages.slots(torch.arange(tokens, device="cuda"))
    for side, codec in enumerate(pages.codecs):
        for buffer in codec.buffers(dim):
            count = heads if buffer.heads == "each" else 1
            if buffer.tokens == "once":
                pages.statistics[side][buffer.name].copy_(values(codec, buffer, (batch, count, 1, buffer.width)))
                continue
            for begin in range(0, tokens, 4096):
                part = slots[:, :, begin : begin + 4096]
                pages.pages.put(side, part, {buffer.name: values(codec, buffer, (batch, count, part.shape[2], buffer.width))})
    return pages


def values(codec: Codec, buffer: Buffer, shape: tuple[int, ...]) -> Tensor:
    dtype = buffer.dtype or torch.bfloat16
    if buffer.role == "codes" and dtype.is_floating_point:
        return torch.randn(shape, device="cuda", dtype=dtype)
    if buffer.role == "codes":
        x = torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)
        return x.bitwise_and_(0xF7) if isinstance(codec, ScaledFloat8) else x.view(dtype)
    if dtype == torch.uint8:
        return torch.randint(40, 60, shape, device="cuda", dtype=dtype)
    return torch.rand(shape, device="cuda").mul_(0.01).add_(0.001).to(dtype)


def code_bytes(name: str, batch: int, heads: int, tokens: int, dim: int) -> int:
    return KNOWN[name].bytes_per_token(dim, heads) * batch * tokens


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def payloads(name: str, batch: int, heads: int, tokens: int, dim: int, zones: tuple[int, int] = (4, 96)) -> list[AttentionInputs]:
    """Two of them, or one if it is large; `tokens` are packed, and those of the zones come on top."""
    found = []
    for _ in range(1 if code_bytes(name, batch, heads, tokens, dim) > TWO_GB else 2):
        first, recent = ((bf16(batch, heads, n, dim), bf16(batch, heads, n, dim)) for n in zones)
        found.append(attention_inputs_of(first, filled(name, batch, heads, tokens, dim), recent))
    return found


def attend_us(query: Tensor, sets: list[AttentionInputs], mask: Tensor | None = None, **options) -> float:
    attend = observe_pages if "observed" in options else plan.attend_pages
    return graph_us([functools.partial(attend, query, attention_inputs.paged, mask, **options) for attention_inputs in sets])


@functools.cache
def sdpa_us(batch: int, query_heads: int, heads: int, tokens: int, dim: int, queries: int = 1, causal: bool = False) -> tuple[float, str]:
    """The faster backend. Without a mask, which for the last `queries` of many tokens spares nearly nothing; with one for a prefill."""
    query = bf16(batch, query_heads, queries, dim)
    count = 1 if batch * heads * tokens * dim * 4 > TWO_GB else 2
    sets = [(bf16(batch, heads, tokens, dim), bf16(batch, heads, tokens, dim)) for _ in range(count)]
    times = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                options = {"enable_gqa": heads < query_heads, "is_causal": causal}
                calls = [functools.partial(F.scaled_dot_product_attention, query, k, v, **options) for k, v in sets]
                times.append((graph_us(calls), backend.name))
        except RuntimeError as error:
            print(f"sdpa {backend.name} at {batch}x{tokens}: {str(error)[:100]}", file=sys.stderr)
    return min(times)


def bandwidth() -> tuple[float, float]:
    """GB/s of a copy (read and written) and of a sum."""
    x = torch.zeros(2**28, device="cuda")
    y = torch.empty_like(x)
    size = x.numel() * 4 / 1e3
    return 2 * size / graph_us([lambda: y.copy_(x)], 5), size / graph_us([lambda: x.sum()], 5)


def real_payload(name: str, key: Tensor, value: Tensor, first: int, recent: int) -> AttentionInputs:
    format, tokens = KNOWN[name], key.shape[2]
    region = RowPages((format.key, format.value), (key, value))
    region.append((key[:, :, first : tokens - recent], value[:, :, first : tokens - recent]))
    return attention_inputs_of(
        (key[:, :, :first], value[:, :, :first]), region, (key[:, :, tokens - recent :], value[:, :, tokens - recent :])
    )


def wrong() -> set[str]:
    """Formats whose fused attention differs from the reference by more than rounding, or fails."""
    found = set()
    for name in KNOWN:
        for dim, queries, dtype, limit in ((128, 1, torch.bfloat16, 8e-3), (64, 3, torch.float16, 3e-3)):
            if KNOWN[name].refuses(dim):
                continue
            torch.manual_seed(0)
            key, value, query = (torch.randn(2, h, n, dim, device="cuda", dtype=dtype) for h, n in ((2, 700), (2, 700), (8, queries)))
            try:
                attention_inputs = real_payload(name, key, value, 4, 33)
                observed = torch.ones(2, queries, device="cuda")
                expected, expected_mass = attend_observed(query.float(), attention_inputs, causal=True, observed=observed)
                out, attention_sums = observe_pages(query, attention_inputs.paged, causal=True, observed=observed)
                pairs = [
                    (plan.attend_pages(query, attention_inputs.paged, causal=True)[0], expected),
                    (out, expected),
                    (attention_sums, expected_mass),
                ]
                error = max(((x.float() - y).norm() / y.norm()).item() for x, y in pairs)
            except Exception as failure:  # whatever it is, the format is not timed
                error = float("nan")
                print(f"{name}: {type(failure).__name__}: {str(failure)[:200]}", file=sys.stderr)
            if not error < limit:
                found.add(name)
                print(f"WRONG {name}, head_dim {dim}, {queries} queries: relative error {error:.1e} (limit {limit:.0e})", flush=True)
    print(f"checked {len(KNOWN)} formats against the reference: {len(found)} wrong", flush=True)
    return found


def tune(names: list[str]) -> None:
    query, base = bf16(8, 32, 1, 128), sdpa_us(8, 32, 8, 32768, 128)[0]
    for name in names:
        sets, times = payloads(name, 8, 8, 32768, 128), []
        for values in TUNED:
            try:
                times.append((attend_us(query, sets, launch=fused.Launch(*values)), values))
            except Exception as failure:  # too many registers or too much shared memory
                print(f"{name} {values}: {str(failure)[:100]}", file=sys.stderr)
        now = attend_us(query, sets)
        best = ", ".join(f"{fused.Launch(*values)} {us:.0f} us x{base / us:.2f}" for us, values in sorted(times, key=lambda x: x[0])[:3])
        print(f"{name}: as set {now:.0f} us; best {best}", flush=True)
        del sets


def measure(names: list[str], quick: bool, add: Callable[..., None]) -> None:
    def few(chosen: tuple[str, ...]) -> list[str]:
        return [] if quick else [name for name in names if name in chosen]

    def attended(kind: str, name: str, case: str, us: float, shape: tuple[int, int, int, int, int], queries: int = 1, **more) -> None:
        batch, query_heads, heads, tokens, dim = shape
        base, backend = sdpa_us(*shape, queries)
        size = code_bytes(name, batch, heads, tokens, dim)
        floor = batch * heads * tokens * dim * 4 / size
        add(kind, name, case, us, size, ratio=round(base / us, 3), floor=round(floor, 3), sdpa_us=round(base, 1), sdpa=backend, **more)

    shapes = [(batch, 32, 8, tokens, 128) for batch, tokens in (CASES[:1] if quick else CASES)]
    shapes += [] if quick else [(8, query_heads, heads, 32768, dim) for query_heads, heads, dim in SHAPES]
    for shape in shapes:
        batch, query_heads, heads, tokens, dim = shape
        usual = (query_heads, heads, dim) == (32, 8, 128)
        case = f"{batch}x{tokens}" + ("" if usual else f", {query_heads}/{heads} heads, D={dim}")
        for name in names if usual else few(FEW):
            attended("attend", name, case, attend_us(bf16(batch, query_heads, 1, dim), payloads(name, batch, heads, tokens, dim)), shape)
        torch.cuda.empty_cache()
    shape = (8, 32, 8, 32768, 128)
    for name in few(TWO):
        query, mask = bf16(8, 32, 1, 128), torch.ones(8, 1, 1, 32868, dtype=torch.bool, device="cuda")
        for on, zones in ((False, (0, 0)), (True, (4, 96))):
            sets = payloads(name, 8, 8, 32768, 128, zones)
            attended("zones", name, f"zones {'on' if on else 'off'}", attend_us(query, sets), shape, on=on)
        for on in (False, True):
            attended("mask", name, f"mask {'on' if on else 'off'}", attend_us(query, sets, mask if on else None), shape, on=on)
        for on in (False, True):
            counted = {"observed": torch.ones(8, 1, device="cuda")} if on else {}
            attended("mass", name, f"mass {'on' if on else 'off'}", attend_us(query, sets, **counted), shape, on=on)
        for queries in (4, 16):
            us = attend_us(bf16(8, 32, queries, 128), sets, causal=True)
            attended("queries", name, f"{queries} queries", us, shape, queries)
        sets, out = payloads(name, 1, 8, 32768, 128, (4, 160)), [bf16(1, 8, 32768, 128) for _ in range(2)]
        for queries in (16, 32, 64, 128):
            query = bf16(1, 32, queries, 128)

            def dense(inputs: AttentionInputs, query: Tensor = query, out=out) -> None:
                dequantize_pages(inputs.paged.pages, out)
                F.scaled_dot_product_attention(query, *out, enable_gqa=True)

            us, other = attend_us(query, sets, causal=True), graph_us([functools.partial(dense, p) for p in sets])
            more = {"dense_us": round(other, 1), "of_dense": round(other / us, 3)}
            attended("chunk", name, f"1x32768, {queries} queries", us, (1, 32, 8, 32768, 128), queries, **more)
        del sets, out
    if not quick:
        measure_columns(add)
    for name in names:
        # A step of so many rows, the group that a growing cache quantizes at a time, prompts.
        for batch, tokens in ((8, 32768), (1, 1), (8, 1), (32, 1), (1, 32), (1, 8192)):
            sets = [filled(name, batch, 8, tokens, 128) for _ in range(1 if tokens > 8192 else 4)]
            inputs = [(bf16(batch, 8, tokens, 128), bf16(batch, 8, tokens, 128)) for _ in sets]
            calls = [functools.partial(quantize_into, p.pages, x, 0) for x, p in zip(inputs, sets, strict=True)]
            size = code_bytes(name, batch, 8, tokens, 128) + batch * 8 * tokens * 128 * 4
            add("encode", name, f"{batch}x{tokens}", graph_us(calls), size)
        out = bf16(1, 8, 8192, 128), bf16(1, 8, 8192, 128)
        calls = [functools.partial(dequantize_pages, p.pages, out) for p in sets]
        add("decode", name, "1x8192", graph_us(calls), size)


def measure_columns(add: Callable[..., None]) -> None:
    """Accumulated attention of a prompt beside its attention."""
    shape = (1, 32, 8, 32768, 128)
    batch, query_heads, heads, tokens, dim = shape
    query, key, observed = bf16(batch, query_heads, tokens, dim), bf16(batch, heads, tokens, dim), torch.ones(batch, tokens, device="cuda")
    lse = torch.full((batch, query_heads, tokens), 10.0, device="cuda")
    base, backend = sdpa_us(*shape, queries=tokens, causal=True)
    cases = [("given lse", tokens, lse), ("without lse", tokens, None), ("last 32 queries", 32, None)]
    for case, queries, level in cases:
        call = functools.partial(sum_attention, query[:, :, -queries:], key, observed[:, -queries:], scaling=dim**-0.5, lse=level)
        us = graph_us([call], 5)
        size = 2 * dim * (query_heads * queries + heads * tokens)
        more = {"ratio": round(base / us, 3)} if queries == tokens else {}
        add("sum_attention", "bf16", f"{batch}x{tokens}, {case}", us, size, **more, sdpa_us=round(base, 1), sdpa=backend)
    us = graph_us([lambda: prefill_with_lse(query, key, key, dim**-0.5)], 5)
    size, more = 2 * dim * tokens * 2 * (query_heads + heads), {"ratio": round(base / us, 3)}
    add("sum_attention", "bf16", f"{batch}x{tokens}, attention with lse", us, size, **more, sdpa_us=round(base, 1), sdpa=backend)


def _place(row: dict) -> int:
    """Of its format in the registry."""
    return list(KNOWN).index(row["format"].removesuffix(UNCENTERED))


def attended_rows(rows: list[dict]) -> dict[str, dict[tuple[str, str], dict]]:
    """`{device: {(format, case): row}}`"""
    found: dict[str, dict[tuple[str, str], dict]] = {}
    for row in sorted((row for row in rows if row["kind"] == "attend"), key=_place):
        found.setdefault(row["device"], {})[row["format"], row["case"]] = row
    return found


def tables(rows: list[dict]) -> Iterator[Table]:
    cases = [f"{batch}x{tokens}" for batch, tokens in CASES]
    for device, attended in attended_rows(rows).items():
        lines = []
        for name in dict.fromkeys(name for name, _ in attended):
            found = [attended.get((name, case)) for case in cases]
            cells = [f"{row['us']:,.0f} / {row['ratio']:.2f} / {row['floor']:.2f}" if row else "-" for row in found]
            lines.append([f"`{name}`", f"{KNOWN[name.removesuffix(UNCENTERED)].bytes_per_token(128, 8) / 8:g}", *cells])
        yield Table(["format", "bytes a token and head", *cases], lines, f"{device}: us / ratio / floor ratio")


def plot(rows: list[dict], path: Path) -> None:
    devices = attended_rows(rows)
    with picture(path, len(devices), dpi=130, figsize=(9, 4.5 * len(devices))) as (_, grid):
        for (axes,), (device, found) in zip(grid, devices.items(), strict=True):
            both = [format for format, case in found if case == "{}x{}".format(*CASES[0]) and (format, "{}x{}".format(*CASES[1])) in found]
            formats = [name for name in both if name.removesuffix(UNCENTERED) == name or name.removesuffix(UNCENTERED) not in both]
            names = [name.removesuffix(UNCENTERED) for name in formats]
            for shift, strength, (batch, tokens) in zip((-0.2, 0.2), (1, 0.5), CASES[:2], strict=True):
                ratios = [found[format, f"{batch}x{tokens}"]["ratio"] for format in formats]
                where = [i + shift for i in range(len(formats))]
                axes.barh(where, ratios, 0.36, color=[format_color(format) for format in formats], alpha=strength)
                axes.barh([0], [0], color="black", alpha=strength, label=f"{batch} sequences of {tokens:,} tokens")
            floors = [found[format, "{}x{}".format(*CASES[0])]["floor"] for format in formats]
            label = "bound: times fewer bytes"
            axes.scatter(floors, range(len(formats)), marker="|", s=450, color="black", label=label, zorder=3)
            axes.axvline(1, color="gray", linewidth=1, linestyle="--")
            axes.set_title(f"Decode attention on {device}; keys without their mean, which costs up to 3 %", fontsize=10)
            axes.set(
                yticks=range(len(formats)), yticklabels=names, xlabel="times as fast as the best bf16 SDPA, one layer (right is better)"
            )
            axes.invert_yaxis()
            axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.12), ncols=3, fontsize=8, markerscale=0.5)


@torch.no_grad()
def run(args: Namespace) -> None:
    begin, bad = time.perf_counter(), wrong() if args.check else set()
    names = [name for name in args.formats if name not in bad]
    if args.tune:
        tune(names)
        raise SystemExit
    device, (copy, read) = torch.cuda.get_device_name(), bandwidth()
    print(f"{device}: copy {copy:,.0f} GB/s, read {read:,.0f} GB/s", flush=True)
    same = {"copy_gb_s": round(copy), "read_gb_s": round(read), "device": device}
    same |= {"triton": importlib.import_module("triton").__version__}

    def add(kind: str, name: str, case: str, us: float, size: int, **more) -> None:
        rate = size / us / 1e3
        row = {"kind": kind, "format": name, "case": case, "us": round(us, 2)}
        row |= {"gb_s": round(rate, 1), "of_copy": round(rate / copy, 4)} | more | same
        print(f"{time.perf_counter() - begin:4.0f} s  {row}", file=sys.stderr, flush=True)
        replace_rows(args.out, "kernels", [row], "device", "format", "kind", "case")

    measure(names, args.quick, add)


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "kernels")
    parser.add_argument("--formats", nargs="+", choices=list(KNOWN), default=list(FORMATS), metavar="A,B")
    parser.add_argument("--check", action="store_true", help="compare with the reference first; a format that is wrong is not timed")
    parser.add_argument("--quick", action="store_true", help="8x32768, encode and decode alone")
    parser.add_argument("--tune", action="store_true", help="launch sizes at 8x32768; writes nothing")
    run_or_show(parser, parser.parse_args(arguments), run, "kernels", tables, plot)


if __name__ == "__main__":
    main()
