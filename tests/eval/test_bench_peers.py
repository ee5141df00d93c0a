"""The benchmark beside peers runs in its tiny form, with a stand-in for FlashInfer that reads the pages that FlashInfer would."""

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from harness import read_rows


def attention(q, pages, table, lengths, queries=1):
    """Causal attention `[B * Q, Hq, D]` of the last queries of each row over pages `[pages, H, PAGE, D]`."""
    out = []
    for row, query in enumerate(q.split(queries)):
        key, value = (x[table[row]].float().transpose(0, 1).flatten(1, 2)[:, : lengths[row]] for x in pages)
        mask = torch.ones(queries, lengths[row]).tril(lengths[row] - queries).bool()
        out.append(F.scaled_dot_product_attention(query.float().transpose(0, 1), key, value, mask, enable_gqa=True).transpose(0, 1))
    return torch.cat(out).to(q.dtype)


class Wrapper:
    def __init__(self, workspace, layout="HND", **options):
        assert layout == "HND" and workspace.numel() >= 2**27

    def plan(self, *given, **dtypes):
        *rows, begins, pages, last = (x for x in given if isinstance(x, torch.Tensor))
        self.queries, self.table = int(rows[0][1]) if rows else 1, pages.view(len(last), -1)
        self.lengths = (last if 512 in given[4:] else begins.diff() * 64 - 64 + last).tolist()  # of latents, all tokens are given

    def run(self, q, pages, *of_latents):
        if of_latents:
            q, pages = torch.cat([q, pages], dim=-1), (torch.cat(of_latents, dim=-1)[:, None], of_latents[0][:, None])
        return attention(q, pages, self.table, self.lengths, self.queries)


def xqa(q, key, value, table, lengths, out, scratch, semaphores, heads, page, kv_layout):
    out.copy_(attention(q[:, 0], (key, value), table, lengths.view(torch.int32)[:, 0].tolist())[:, None])


@pytest.fixture
def bench(monkeypatch):
    kinds = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper", "BatchMLAPagedAttentionWrapper"
    module = SimpleNamespace(__spec__=ModuleSpec("flashinfer", None), __version__="a stand-in", xqa=xqa, **dict.fromkeys(kinds, Wrapper))
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    bench = importlib.import_module("bench_peers")
    bench.check.cache_clear()
    return bench


def test_every_case_has_a_row_and_a_cell(bench, tmp_path, capsys, monkeypatch):
    called = []
    monkeypatch.setattr(bench, "ProcessPoolExecutor", lambda processes, context: ThreadPoolExecutor(processes))
    monkeypatch.setattr(bench, "called", lambda case, name, tiny: called.append((case.section, name)))
    bench.main(["--tiny", "--out", str(tmp_path / "rows.jsonl")])
    rows = read_rows(tmp_path / "rows.jsonl")
    assert len(rows) == 24 and all(row["us"] > 0 and row["bytes"] > 0 and row["flashinfer"] == "a stand-in" for row in rows)
    assert sorted(called) == sorted((row["what"], row["name"]) for row in rows if row["name"] != bench.SDPA)
    bench.main(["--markdown", "--out", str(tmp_path / "rows.jsonl")])
    assert capsys.readouterr().out.count(" / ") == 2 * (len(rows) + len(bench.CASES))


def test_peers_that_are_wrong_or_missing_have_no_time(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Wrapper, "run", lambda self, q, *_: q[..., :512])
    monkeypatch.delattr(sys.modules["flashinfer"], "BatchPrefillWithPagedKVCacheWrapper")
    bench.main(["--tiny", "--processes", "0", "--sections", "latents,new", "--out", str(tmp_path / "rows.jsonl")])
    failed = [row["failed"].split(":")[0] for row in read_rows(tmp_path / "rows.jsonl") if "failed" in row]
    assert failed == ["ValueError"] * 2 + ["AttributeError"] * 2 and capsys.readouterr().out.count("failed") == 4
    with pytest.raises(SystemExit):
        bench.main(["--sections", "prefill"])
