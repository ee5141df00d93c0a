"""The example of the prefix store, made small."""

from tests.examples.load import load


def test_a_chat_computes_each_token_once(capsys):
    rows = load("prefix_chat").main(["--tokens", "600", "--turns", "2", "--format", "int8"])
    assert [row["turn"] for row in rows] == ["1", "2", "after a restart"]
    assert [row["reused"] for row in rows] == [0, rows[0]["prompt"], rows[1]["prompt"]]
    assert all(row["answer"] == row["answer_without"] and row["right"] for row in rows)
    assert all(row["store_bytes"] < 0.6 * row["dense_bytes"] for row in rows)
    assert rows[1]["first_with"] < rows[1]["first_without"]
    printed = capsys.readouterr().out
    assert "after a restart" in printed and "time to first token" in printed
