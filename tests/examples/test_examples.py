"""The scripts among the examples, made small."""

import re

import pytest
import torch

from qkvcache import demo, models
from tests.examples.load import EXAMPLES, load
from tests.processes import ranks
from tests.releases import BATCHING

batching = pytest.mark.skipif(not BATCHING, reason="continuous batching needs transformers 5.24")


def test_a_chat_goes_on_in_constant_memory(capsys):
    rows = load("streaming_chat").main(["--window", "124"])
    assert "dilzon" in rows[1]["answer"]  # what it was just told
    assert "dilzon" not in rows[3]["answer"]  # what left the window
    assert rows[-1]["seen"] > 1000 and len({row["bytes"] for row in rows[2:]}) == 1
    assert all(row["computed"] < 700 for row in rows)  # the turn alone
    assert "128 held" in capsys.readouterr().out


def test_samples_of_one_prompt_hold_it_once(capsys):
    rows = load("branches").main(["--tokens", "500", "--branches", "4", "--device", "cpu"])
    alone, branches, forks = rows
    assert [row["way"] for row in rows] == ["rows", "branches", "forks"]
    assert all(row["answer"] == row["word"] and row["right"] for row in rows)  # the best one, at a temperature where others may be wrong
    assert alone["prompt_tokens"] == 4 * branches["prompt_tokens"] == 4 * forks["prompt_tokens"]
    assert branches["bytes"] < 0.6 * alone["bytes"] and forks["bytes"] < 0.6 * alone["bytes"]
    assert "best of 4" in capsys.readouterr().out


@pytest.fixture
def document(tmp_path):
    """600 tokens of the reference, with a code word in the middle of what is compressed."""
    path, text = tmp_path / "document.txt", demo.text()
    path.write_text(f"{text[:400]} The code word of Anna is dilzon. {text[400:2000]}")
    return path


ASKED = "What is the code word of Anna? The code word of Anna is"


def test_a_chat_about_a_document(capsys, document):
    options = ["--model", "demo", "--document", str(document), "--new-tokens", "6", "--dtype", "float32"]
    first, second = load("chat").main([*options, "--questions", ASKED, ASKED])
    assert first.answer.startswith("dilzon.") and second.answer.startswith("dilzon.")
    assert first.read < 30 and second.read == first.read + 1  # its own tokens, and the last one of the answer before
    printed = capsys.readouterr().out
    assert printed.count("uncompressed: the same words") == 2 and "bf16 takes" in printed and "codes 0.0" not in printed


def test_an_answer_ends_with_a_sentence_or_a_circle():
    tokenizer = demo.load()[1]
    complete = load("chat").Complete(tokenizer, 3, 40)

    def ends(answer: str) -> bool:
        ids = torch.tensor([[1, 1, 1, *tokenizer(answer, add_special_tokens=False)["input_ids"]]])
        return bool(complete(ids, None)[0])

    sentence = "It is said that the name of the old lighthouse on the cliff is Kestrel Point, and that"
    assert not ends("It is. ") and not ends(sentence)  # too short, and not over
    assert ends(f"{sentence} it is old.") and ends(
        "a password that is used to read a thing and " * 2 + "a password that is used to read a thing"
    )


def test_a_chat_with_a_policy_in_preallocated_storage(capsys, document):
    options = ["--model", "demo", "--document", str(document), "--new-tokens", "2", "--policy", "sink_window", "--max-length", "1000"]
    load("chat").main([*options, "--budget", "100", "--format", "identity", "--questions", "Who?", "/reset", "/cache", "--no-compare"])
    printed = capsys.readouterr().out
    assert "104 of them kept" in printed and "uncompressed:" not in printed and "CompressedCache(format=identity" in printed


def test_a_chat_whose_policy_reads_the_document_twice(capsys, document):
    options = ["--model", "demo", "--document", str(document), "--new-tokens", "6", "--policy", "kvzip", "--budget", "0.5"]
    (turn,) = load("chat").main([*options, "--questions", ASKED])
    seen, kept = map(int, re.search(r"holds (\d+) tokens, (\d+) of them kept", capsys.readouterr().out).groups())
    assert 0.4 * seen < kept < 0.7 * seen and turn.read < 30  # heads keep different numbers: the mean of all layers


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
        (["--device", "cuda:99"], "device='cuda:99' is not on this machine"),
        (["--document", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--tokens", "5000"], "demo reads 4,096: pass a smaller --tokens"),
        (["--format", "turboquant_4bit_nc", "--policy", "h2o", "--budget", "0.5", "--max-length", "3000"], "a share has no fixed size"),
    ],
)
def test_a_chat_explains_wrong_input(arguments, says, capsys):
    with pytest.raises(SystemExit) as found:
        load("chat").main(["--model", "demo", *arguments])
    assert says in f"{found.value} {capsys.readouterr().err}"


def test_a_chat_with_a_real_model(document, monkeypatch):
    monkeypatch.setattr(models.wheels.Wheels, "_get", lambda *args: pytest.skip("smollm2 was not downloaded before: make chat"))
    models.folder("smollm2")
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


@batching
def test_a_batch_beside_transformers_own_pages(capsys):
    dense, four = load("batch").main(["--prompts", "4", "--new-tokens", "4", "--dtype", "float32", "--pool-mb", "20"])
    assert four["tokens"] > 3 * dense["tokens"]
    assert four["answers"] == dense["answers"] and all(len(answer) == 4 for answer in four["answers"])
    assert "tokens fit" in capsys.readouterr().out


@batching
def test_a_client_of_the_server(capsys):
    pytest.importorskip("openai")
    from tests.batching.clients import address, served

    with served() as server:
        asked = ["--model", "demo", "--raw", "--new-tokens", "4", "--url", f"{address(server)}/v1"]
        answers = load("serve_client").main([*asked, f"The code word of Anna is dilzon. {ASKED}", "The"])
    assert answers[0]["text"].startswith(" dilzon") and [answer["tokens"] for answer in answers] == [4, 4]
    assert "2 requests" in capsys.readouterr().out


@batching
def test_a_batch_with_accelerate():
    state = pytest.importorskip("accelerate").PartialState
    try:
        assert [answer[:7] for answer in load("batch_accelerate").main(["--prompts", "2"])] == [" dilzon"] * 2
    finally:
        state._reset_state()


@batching
@pytest.mark.slow
def test_a_batch_over_processes():
    pytest.importorskip("accelerate")
    printed = [program.result() for program in ranks(EXAMPLES / "batch_accelerate.py", ["--prompts", "3"], 2)]
    assert "process 0 of 2 on cpu:0: 2 prompts" in printed[0] and "process 1 of 2 on cpu:0: 1 prompts" in printed[1]
    assert "3 answers, the first of them ' dilzon" in printed[0]


@pytest.mark.slow
def test_tensor_parallel():
    for program in ranks(EXAMPLES / "tensor_parallel.py", ["--dtype", "float32"], 2):
        program.result()


@pytest.mark.slow
def test_rollouts_through_a_compressed_cache(monkeypatch):
    """The loss gets the log-probabilities of the rollouts, and an exact cache has those of the trained policy."""
    pytest.importorskip("trl")
    example, ratios = load("grpo"), []
    compute = example.GRPOTrainer._compute_loss

    def observed(self, model, inputs):
        with torch.no_grad():
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            now = self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].shape[1])[0]
        ratios.append(((now - inputs["old_per_token_logps"]) * inputs["completion_mask"]).abs().max().item())
        return compute(self, model, inputs)

    monkeypatch.setattr(example.GRPOTrainer, "_compute_loss", observed)
    for format in ("identity", "hadaquant_k2v2"):
        example.main(["--steps", "1", "--prompt-tokens", "200", "--format", format])
    assert ratios[0] < 1e-3 < 1e-2 < ratios[1]
