"""The examples of the prefix store, made small."""

import json

from tests.examples.load import EXAMPLES, load


def test_a_chat_computes_each_token_once(capsys):
    rows = load("prefix_chat").main(["--tokens", "600", "--turns", "2", "--format", "int8"])
    assert [row["turn"] for row in rows] == ["1", "2", "after a restart"]
    assert [row["reused"] for row in rows] == [0, rows[0]["prompt"], rows[1]["prompt"]]
    assert all(row["answer"] == row["answer_without"] and row["right"] for row in rows)
    assert all(row["store_bytes"] < 0.6 * row["dense_bytes"] for row in rows)
    assert rows[1]["first_with"] < rows[1]["first_without"]
    printed = capsys.readouterr().out
    assert "after a restart" in printed and "time to first token" in printed


def test_the_notebook_runs(capsys):
    notebook = json.loads((EXAMPLES / "prefix_store.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict = {}
    for cell in code:
        exec("".join(cell["source"]), names)  # noqa: S102
    assert names["none"] == 0 and names["reused"] > 1500
    assert (names["match"].kind, names["match"].length) == ("exact", names["first"].shape[1] - 1)
    assert names["half"].length == 699 and names["out"].shape[0] == 4
    assert names["restarted"].source == "disk" and names["restarted"].length == names["match"].length
    assert "miss miss" in capsys.readouterr().out
    assert type(names["found"].cache).__name__ == "DynamicCache"
