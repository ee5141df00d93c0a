"""GGUF files as folders that every library loads: bf16 safetensors, converted once."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..progress import progress


def home() -> Path:
    """Where converted models, and files of packages, are kept: `$XDG_CACHE_HOME/qkvcache/models`, by default under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "qkvcache" / "models"


def converted(key: str, file: Callable[[Path], Path]) -> Path:
    """The folder `key` of `home()`, created if it does not exist from the GGUF file that `file` returns, which it may write into the
    given folder. Several processes may create it at the same time.

    Raises ModuleNotFoundError without the package gguf, and what `file` raises.
    """
    target = home() / key
    if target.exists():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError(f"{key} is a GGUF file, which transformers reads with the package gguf: pip install gguf")
    home().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home()) as aside:
        made = Path(aside) / "model"
        _convert(file(Path(aside)), made)
        try:
            made.rename(target)
        except OSError:  # another process was faster
            if not target.exists():
                raise
    return target


def _convert(gguf: Path, made: Path) -> None:
    with progress(f"converting {gguf.name} to safetensors"):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
        # transformers refuses to cast or save a model that was read from GGUF: its weights go into a fresh one.
        config = loaded.config
        del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.generation_config = loaded.generation_config
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
