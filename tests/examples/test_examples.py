"""The scripts among the examples, made small. Notebooks are run by nbmake."""

import json

import pytest
from examples.load import EXAMPLES, load
from ranks import finish, start

from qkvcache import demo, models


def test_a_chat_goes_on_in_constant_memory(capsys):
    rows = load("streaming_chat").main(["--window", "124"])
    assert "dilzon" in rows[1]["answer"]  # what it was just told
    assert "dilzon" not in rows[3]["answer"]  # what left the window
    assert rows[-1]["seen"] > 1000 and len({row["bytes"] for row in rows[2:]}) == 1
    assert all(row["computed"] < 700 for row in rows)  # the turn alone
    assert "128 held" in capsys.readouterr().out


@pytest.fixture
def document(tmp_path):
    """600 tokens of the reference, with a code word in the middle of what is compressed."""
    path, text = tmp_path / "document.txt", demo.text()
    path.write_text(f"{text[:400]} The code word of Anna is dilzon. {text[400:2000]}")
    return path


ASKED = "What is the code word of Anna? The code word of Anna is"


def test_a_chat_about_a_document(capsys, document):
    options = ["--model", "demo", "--document", str(document), "--new-tokens", "6", "--dtype", "float32", "--compare"]
    first, second = load("chat").main([*options, "--questions", ASKED, ASKED])
    assert first.answer.startswith("dilzon.") and second.answer.startswith("dilzon.")
    assert first.read < 30 and second.read == first.read + 1  # its own tokens, and the last one of the answer before
    printed = capsys.readouterr().out
    assert printed.count("dense: the same words") == 2 and "bf16 takes" in printed and "codes 0.0" not in printed


def test_a_chat_with_a_policy_in_preallocated_storage(capsys, document):
    options = ["--model", "demo", "--document", str(document), "--new-tokens", "2", "--policy", "sink_window", "--max-length", "1000"]
    load("chat").main([*options, "--budget", "100", "--format", "identity", "--questions", "Who?", "/reset", "/cache"])
    printed = capsys.readouterr().out
    assert "104 of them kept" in printed and "CompressedCache(format=identity" in printed


def test_a_chat_on_a_terminal(capsys, document, monkeypatch):
    lines = iter([ASKED, "", "/reset", ASKED])

    def typed(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda self: True})())
    first, again = load("chat").main(["--model", "demo", "--document", str(document), "--new-tokens", "6"])
    assert first.ids == again.ids and first.read == again.read  # nothing of the first turn was left


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--format", "int9"], "int9"),
        (["--format", "dynamic"], "--format identity"),
        (["--budget", "9"], "add one, such as policy=h2o"),
        (["--model", "./nowhere"], "'./nowhere' does not exist"),
        (["--document", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--tokens", "5000"], "demo reads 4,096: pass a smaller --tokens"),
        (["--format", "turboquant_4bit_nc", "--policy", "h2o", "--budget", "0.5", "--max-length", "3000"], "a share has no fixed size"),
    ],
)
def test_a_chat_explains_wrong_input(arguments, says, capsys):
    with pytest.raises(SystemExit) as found:
        load("chat").main(["--model", "demo", *arguments])
    assert says in f"{found.value} {capsys.readouterr().err}"


def test_a_chat_with_a_real_model(document):
    try:
        models.folder("smollm2")
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    document.write_text(document.read_text().replace("The code word of Anna is dilzon", "The name of the head gardener is Margaret Finch"))
    questions = ["What is the name of the head gardener?", "What is the name of the gardener?"]
    options = ["--document", str(document), "--tokens", "400", "--new-tokens", "12", "--dtype", "float32"]
    turns = load("chat").main([*options, "--questions", *questions])
    assert all("Finch" in turn.answer for turn in turns)
    assert all(turn.read < 30 for turn in turns)
    assert "<|im_" not in turns[0].answer


def test_device_map(capsys):
    pytest.importorskip("accelerate")
    found = load("device_map").main(["--device-map", "auto", "--dtype", "float32"])
    assert found["answer"].strip().startswith("dilzon") and set(found["bytes"]) == {"cpu"}
    assert "MB of the cache" in capsys.readouterr().out


@pytest.mark.slow
def test_tensor_parallel():
    finish(start(EXAMPLES / "tensor_parallel.py", ["--dtype", "float32"], 2))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_stored_without_output(path):
    cells = json.loads(path.read_text())["cells"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")
    assert sum(cell["cell_type"] == "markdown" for cell in cells) >= 3
