"""Speed of the Triton kernels on one GPU, every format beside bf16 SDPA of the same run.

    python eval/bench_kernels.py [--quick]               measure, print a table, write eval/results/kernels.jsonl
    python eval/bench_kernels.py --markdown | --plot     the table of the documentation | kernels.png, from the rows: needs no GPU

GPU time, by replays of a CUDA graph over payloads in turn (`sets_of` in `gpu.py`); medians.
Ratio: time of the better of flash and cuDNN attention on as many bf16 tokens / time of `attend_pages`, whole: its reduction, and 4 + 96
exact tokens on top. Floor ratio: bytes of those bf16 tokens / bytes of the codes. Codes are random
bytes; `tests/kernels` compare kernels with their references on a GPU, too.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu import bf16, device, graph_us, sets_of
from harness import Table, note, parser_of, picture, run_or_show
from palette import UNCENTERED, format_color
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from qkvcache.evict.observe import observe_pages
from qkvcache.formats import REGISTRY, Buffer, Codec, HadaQuant, Int8
from qkvcache.formats.fp8 import ScaledFloat8
from qkvcache.kernels import AttentionInputs
from qkvcache.storage import RowPages, attention_inputs_of

if importlib.util.find_spec("triton"):
    from qkvcache.kernels.attend import plan
    from qkvcache.kernels.store.triton_dequantize import dequantize_pages
    from qkvcache.kernels.store.triton_store import quantize_into

KNOWN = REGISTRY | {"hadaquant_k4v4": HadaQuant(4, 4), "int8_halves": Int8(halves=True)}
"""The format in halves is not registered: caches choose it where upper halves are read alone."""
TURBO = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
HADA = ("hadaquant_k4v4", "hadaquant_k4v3", "hadaquant_k3v3", "hadaquant_k3v2", "hadaquant_k2v2")
FORMATS = ("identity", "int8", "fp8", TURBO[0], "nvfp4", "int4", "int4_vllm", *TURBO[1:], *HADA)
FEW = ("int8", "nvfp4", "turboquant_4bit_nc", "turboquant_3bit_nc")
CASES = ((8, 32768), (8, 131072), (1, 32768), (32, 4096))
SHAPES = ((32, 8, 64), (32, 32, 128), (64, 8, 128))  # query heads, KV heads, head_dim


def filled(name: str, batch: int, heads: int, tokens: int, dim: int) -> RowPages:
    """Pages of random codes that decode to finite numbers, as storage allocates them."""
    format = KNOWN[name]
    like = torch.empty(batch, heads, 0, dim, device=device(), dtype=torch.bfloat16)
    pages = RowPages((format.key, format.value), (like, like))
    pages.reserve(tokens)
    pages.length, pages.calibrated = tokens, True
    slots = pages.pages.slots(torch.arange(tokens, device=device()))
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
        return torch.randn(shape, device=device(), dtype=dtype)
    if buffer.role == "codes":
        x = torch.randint(0, 256, shape, device=device(), dtype=torch.uint8)
        return x.bitwise_and_(0xF7) if isinstance(codec, ScaledFloat8) else x.view(dtype)
    if dtype == torch.uint8:
        return torch.randint(40, 60, shape, device=device(), dtype=dtype)
    return torch.rand(shape, device=device()).mul_(0.01).add_(0.001).to(dtype)


def code_bytes(name: str, batch: int, heads: int, tokens: int, dim: int) -> int:
    return KNOWN[name].bytes_per_token(dim, heads) * batch * tokens


def payloads(name: str, batch: int, heads: int, tokens: int, dim: int, zones: tuple[int, int] = (4, 96)) -> list[AttentionInputs]:
    """`sets_of` its bytes; `tokens` are packed, and those of the zones come on top."""
    found = []
    for _ in range(sets_of(code_bytes(name, batch, heads, tokens, dim))):
        first, recent = ((bf16(batch, heads, n, dim), bf16(batch, heads, n, dim)) for n in zones)
        found.append(attention_inputs_of(first, filled(name, batch, heads, tokens, dim), recent))
    return found


def attend_us(query: Tensor, sets: list[AttentionInputs], mask: Tensor | None = None, **options) -> float:
    attend = observe_pages if "observed" in options else plan.attend_pages
    return graph_us([functools.partial(attend, query, attention_inputs.paged, mask, **options) for attention_inputs in sets])


@functools.cache
def sdpa_us(batch: int, query_heads: int, heads: int, tokens: int, dim: int, queries: int = 1) -> tuple[float, str]:
    """The fastest backend and grouping of heads, without a mask, which for the last `queries` of many tokens spares nearly nothing."""
    query = bf16(batch, query_heads, queries, dim)
    count = sets_of(batch * heads * tokens * dim * 4)
    sets = [(bf16(batch, heads, tokens, dim), bf16(batch, heads, tokens, dim)) for _ in range(count)]
    times = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        for name, shaped in ((backend.name, query), (f"{backend.name}, heads as rows", query.view(batch, heads, -1, dim))):
            try:
                with sdpa_kernel(backend):
                    options = {"enable_gqa": shaped.shape[1] > heads}
                    calls = [functools.partial(F.scaled_dot_product_attention, shaped, k, v, **options) for k, v in sets]
                    times.append((graph_us(calls), name))
            except RuntimeError as error:
                print(f"sdpa {name} at {batch}x{tokens}: {str(error)[:100]}", file=sys.stderr)
    return min(times)


def bandwidth() -> tuple[float, float]:
    """GB/s of a copy (read and written) and of a sum."""
    x = torch.zeros(2**28, device=device())
    y = torch.empty_like(x)
    size = x.numel() * 4 / 1e3
    return 2 * size / graph_us([lambda: y.copy_(x)], 5), size / graph_us([lambda: x.sum()], 5)


def measure(names: list[str], quick: bool, add: Callable[..., None]) -> None:
    shapes = [(batch, 32, 8, tokens, 128) for batch, tokens in (CASES[:1] if quick else CASES)]
    shapes += [] if quick else [(8, query_heads, heads, 32768, dim) for query_heads, heads, dim in SHAPES]
    for shape in shapes:
        batch, query_heads, heads, tokens, dim = shape
        usual = (query_heads, heads, dim) == (32, 8, 128)
        case = f"{batch}x{tokens}" + ("" if usual else f", {query_heads}/{heads} heads, D={dim}")
        for name in names if usual else FEW:
            us = attend_us(bf16(batch, query_heads, 1, dim), payloads(name, batch, heads, tokens, dim))
            size = code_bytes(name, batch, heads, tokens, dim)
            base, backend = sdpa_us(*shape)
            floor = batch * heads * tokens * dim * 4 / size
            add("attend", name, case, us, size, ratio=round(base / us, 3), floor=round(floor, 3), sdpa_us=round(base, 1), sdpa=backend)
        torch.cuda.empty_cache()
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
    for place, attended in attended_rows(rows).items():
        lines = []
        for name in dict.fromkeys(name for name, _ in attended):
            found = [attended.get((name, case)) for case in cases]
            cells = [f"{row['us']:,.0f} / {row['ratio']:.2f} / {row['floor']:.2f}" if row else "-" for row in found]
            lines.append([f"`{name}`", f"{KNOWN[name.removesuffix(UNCENTERED)].bytes_per_token(128, 8) / 8:g}", *cells])
        yield Table(["format", "bytes a token and head", *cases], lines, f"{place}: us / ratio / floor ratio")


def plot(rows: list[dict], path: Path) -> None:
    devices = attended_rows(rows)
    with picture(path, len(devices), dpi=130, figsize=(9, 4.5 * len(devices))) as (_, grid):
        for (axes,), (place, found) in zip(grid, devices.items(), strict=True):
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
            axes.set_title(f"Decode attention on {place}; keys without their mean, which costs up to 3 %", fontsize=10)
            axes.set(
                yticks=range(len(formats)), yticklabels=names, xlabel="times as fast as the best bf16 SDPA, one layer (right is better)"
            )
            axes.invert_yaxis()
            axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.12), ncols=3, fontsize=8, markerscale=0.5)


@torch.no_grad()
def run(args: Namespace) -> None:
    name, (copy, read) = torch.cuda.get_device_name(), bandwidth()
    print(f"{name}: copy {copy:,.0f} GB/s, read {read:,.0f} GB/s", flush=True)
    same = {"copy_gb_s": round(copy), "read_gb_s": round(read), "device": name}
    same |= {"triton": importlib.import_module("triton").__version__}

    def add(kind: str, name: str, case: str, us: float, size: int, **more) -> None:
        rate = size / us / 1e3
        row = {"kind": kind, "format": name, "case": case, "us": round(us, 2)}
        row |= {"gb_s": round(rate, 1), "of_copy": round(rate / copy, 4)} | more | same
        note(args.out, "kernels", row, "device", "format", "kind", "case")

    measure(args.formats, args.quick, add)


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "kernels")
    parser.add_argument("--formats", nargs="+", choices=list(KNOWN), default=list(FORMATS), metavar="A,B")
    parser.add_argument("--quick", action="store_true", help="8x32768, encode and decode alone")
    run_or_show(parser, parser.parse_args(arguments), run, "kernels", tables, plot)


if __name__ == "__main__":
    main()
