"""The embedded model: a Llama of five million parameters (5 layers, 4/2 heads, head_dim 128, context 4,096) that
recalls facts of its context.

It was trained by `eval/train_demo_model.py` and loads offline, so that demo, tests and notebooks see real attention patterns anywhere.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import models

MODEL_PATH = Path(models.folder("demo"))


def load(dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, ready for inference, and its tokenizer: `models.load("demo", dtype, device)`."""
    return models.load("demo", dtype, device)


def text() -> str:
    """A text that is part of every Python and that the model was not trained on: the language reference in `pydoc`."""
    topics = importlib.import_module("pydoc_data.topics").topics
    return " ".join("\n\n".join(topics[name] for name in sorted(topics)).split())


def text_ids(tokenizer: PreTrainedTokenizerBase, read: str | None = None) -> list[int]:
    """The token ids of `read`; None: of `text()`."""
    return tokenizer(text() if read is None else read, add_special_tokens=False, verbose=False)["input_ids"]
