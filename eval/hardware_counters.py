"""Hardware counters of the attention kernels, by Nsight Compute (`ncu`); rows in eval/results/hardware_counters.jsonl.

    python eval/hardware_counters.py [--cases decode:int8:8x32768 latents:int8:8x32768:128heads]    needs a GPU and ncu
    python eval/hardware_counters.py --markdown     the table of the documentation, from the rows

ncu runs this script once more (`--call`), which calls each case of `bench_peers.py` three times; the attention kernel of the third call is
profiled, with caches emptied and clocks left as they are. A percentage is of the highest rate or of all cycles. A warp that cannot issue
waits for `long_scoreboard` (global memory), `short_scoreboard` (shared memory), `wait` (a fixed latency), `math_pipe_throttle`
(a busy pipe), `barrier`, `gmma` (tensor cores); `not_selected` could issue, but another warp of its scheduler does.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from bench_peers import CASES, FORMATS, attention
from flashinfer_kernels import Case
from gpu import device, gpu, let_go
from harness import Table, device_name, grouped, note, parser_of, run_or_show, shows


def _key(case: Case, name: str) -> str:
    return f"{case.section}:{name}:{case}".replace(", ", ":").replace(" ", "")


KNOWN = {_key(case, name): (case, name) for section, cases in CASES.items() for case in cases for name in FORMATS[section]}
DEFAULT = (
    *(
        f"decode:{name}:{size}"
        for size in ("8x32768", "128x2048", "256x512", "32x4096", "1x32768")
        for name in ("int8", "turboquant_4bit_nc")
    ),
    *(f"decode:{name}:8x32768" for name in ("nvfp4", "hadaquant_k3v3", "hadaquant_k2v2")),
    *(f"latents:{name}:8x32768:{heads}heads" for heads in (128, 16) for name in ("int8", "turboquant_4bit_nc", "identity")),
    *(f"new:{name}:8x32768+64" for name in ("int8", "turboquant_4bit_nc")),
)
NCU = ("--clock-control", "none", "--set", "full", "--profile-from-start", "off", "-k", "regex:attend", "-f", "-o")
PAGE = "--page", "raw", "--csv"
COUNTERS = {
    "us": "gpu__time_duration.sum",
    "dram_percent": "dram__bytes_read.sum.pct_of_peak_sustained_elapsed",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "alu_percent": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "warps_percent_of_64": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "instructions": "smsp__inst_executed.sum",
}
US = {"ns": 1e-3, "us": 1.0, "ms": 1e3}
"""Microseconds in the unit that ncu chose."""
STALLS = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"


@torch.no_grad()
def call(names: Iterable[str]) -> None:
    """Calls each case: twice for what is compiled and looked up once, and once to be profiled."""
    for name in names:
        attend, _ = attention(*KNOWN[name], tiny=False)
        for _ in range(2):
            attend()
        gpu("synchronize")
        with torch.cuda.profiler.profile():
            attend()
            gpu("synchronize")
        del attend
        let_go()


def launches(report: str) -> Iterator[dict]:
    """The counters of each profiled launch, from ncu's page of raw numbers."""
    lines = list(csv.reader(io.StringIO(report[report.find('"ID"') :])))
    if len(lines) < 3:
        return
    units = dict(zip(lines[0], lines[1], strict=True))
    for line in lines[2:]:
        found = dict(zip(lines[0], line, strict=True))
        number = {
            name: float(found[name].replace(",", "") or 0) for name in found if name in COUNTERS.values() or name.startswith(STALLS[0])
        }
        number[COUNTERS["us"]] *= US[units[COUNTERS["us"]]]
        row = {name: round(number[counter], 2) for name, counter in COUNTERS.items()}
        stalls = {name[len(STALLS[0]) : -len(STALLS[1])]: x for name, x in number.items() if name.endswith(STALLS[1])}
        longest = sorted(stalls, key=lambda name: -stalls[name])[:8]
        share = 100 / (sum(stalls.values()) or 1)
        yield {"kernel": found["Kernel Name"]} | row | {"stalls_percent": {name: round(stalls[name] * share, 1) for name in longest}}


def measure(args: Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = str(Path(folder) / "report")
        called = [sys.executable, __file__, "--call", "--cases", *args.cases]
        try:
            subprocess.run(["ncu", *NCU, report, *called], check=True)
            page = subprocess.run(["ncu", "-i", f"{report}.ncu-rep", *PAGE], check=True, text=True, stdout=subprocess.PIPE).stdout
        except subprocess.CalledProcessError as error:
            sys.exit(f"ncu ended with status {error.returncode}; its messages are above")
    found = list(launches(page))
    if len(found) != len(args.cases):
        sys.exit(f"{len(found)} kernels were profiled in {len(args.cases)} cases: {[row['kernel'] for row in found]}")
    for name, row in zip(args.cases, found, strict=True):
        case, cache = KNOWN[name]
        note(args.out, case.section, {"case": str(case), "name": cache} | row | {"device": device_name(device())}, "case", "name", "device")


def tables(rows: list[dict]) -> Iterator[Table]:
    headers = ("", "us", "memory", "L2", "issue", "integer pipe", "tensor cores", "warps of a scheduler", "its warps wait most for")
    shares = "dram_percent", "l2_percent", "issue_percent", "alu_percent", "tensor_percent"
    for (place, what), found in grouped(rows, "device", "what"):
        lines = []
        for row in found:
            waits = [f"`{name}` {x:.0f} %" for name, x in row["stalls_percent"].items() if name not in ("selected", "not_selected")]
            numbers = [f"{row['us']:,.0f}", *(f"{row[share]:.0f} %" for share in shares), f"{row['warps_percent_of_64'] * 16 / 100:.1f}"]
            lines.append([f"`{row['name']}`, {row['case']}", *numbers, ", ".join(waits[:2])])
        yield Table(headers, lines, title=f"{place}, {what}:")


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "hardware_counters")
    parser.add_argument("--cases", nargs="+", choices=KNOWN, default=DEFAULT, metavar="CASE", help=f"of {', '.join(KNOWN)}")
    parser.add_argument("--call", action="store_true", help="what ncu runs")
    args = parser.parse_args(arguments)
    if args.call:
        return call(args.cases)
    if not shows(args) and not shutil.which("ncu"):
        parser.error("ncu is not on the PATH: it comes with the CUDA toolkit, as Nsight Compute")
    run_or_show(parser, args, measure, "", tables)


if __name__ == "__main__":
    main()
