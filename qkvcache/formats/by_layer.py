"""`FormatByLayer`: a format for each full-attention layer, and the calibration file that holds one.

Layers differ in how much their codes cost: at the same bytes, bits by layer have about half of the KL divergence of one format for all
(`eval/results/calibrated.jsonl`). `qkvcache calibrate` measures a model and writes the file.

The file is JSON: `{"file": "qkvcache formats by layer", "version": 2, "formats": [...], ...}`, with
`{"format": "HadaQuant", "key_bits": 4, ...}` for each layer: a class of this folder and its options. Other
entries describe the calibration (`evaluation/calibrate.py`) and are ignored when the file is read.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from .base import Format
from .registry import REGISTRY, named

FILE, VERSION = "qkvcache formats by layer", 2
CLASSES = {type(format).__name__: type(format) for format in REGISTRY.values()}


@dataclass(frozen=True)
class FormatByLayer:
    """`formats[i]` is the format of the model's full-attention layer `i`, counted without layers of other kinds."""

    formats: tuple[Format, ...]

    def __post_init__(self) -> None:
        if not self.formats:
            raise ValueError("format=(): pass a format for each full-attention layer")
        for number, format in enumerate(self.formats):
            if not isinstance(format, Format):
                raise TypeError(f"format {number} of {len(self.formats)} is {format!r}: expected a name or a qkvcache.formats.Format")

    @cached_property
    def name(self) -> str:
        """The formats with the number of layers that have them: `3 hadaquant_k4v3 + 2 hadaquant_k2v2`."""
        return " + ".join(f"{count} {name}" for name, count in Counter(format.name for format in self.formats).items())

    def for_layers(self, count: int) -> tuple[Format, ...]:
        """The formats of `count` full-attention layers. Raises ValueError for another number of formats."""
        if count != len(self.formats):
            raise ValueError(f"{len(self.formats)} formats for {count} full-attention layers: pass one for all, or one for each")
        return self.formats

    def in_halves(self) -> FormatByLayer:
        """The formats of the layers in halves (`Format.in_halves`)."""
        return FormatByLayer(tuple(format.in_halves() for format in self.formats))

    def bytes_per_token(self, head_dim: int, kv_heads: int = 1, value_dim: int | None = None) -> float:
        """Bytes of one token of one layer, the mean over layers of the same shape (`Format.bytes_per_token`)."""
        return sum(format.bytes_per_token(head_dim, kv_heads, value_dim) for format in self.formats) / len(self.formats)

    def save(self, path: str | os.PathLike[str], **about: object) -> None:
        """Writes a calibration file, with the entries of `about`. Raises ValueError for formats of other
        classes than those of qkvcache."""
        for format in self.formats:
            if type(format) not in CLASSES.values():
                raise ValueError(f"{format!r}: a file holds formats of {', '.join(CLASSES)} alone")
        formats = [{"format": type(format).__name__} | asdict(format) for format in self.formats]
        head = {"file": FILE, "version": VERSION, "formats": formats}
        Path(path).write_text(json.dumps(head | about, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> FormatByLayer:
        """Reads a calibration file. Raises ValueError for any other file, OSError for a path that cannot be read."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            made = "`qkvcache calibrate MODEL --out FILE` writes one"
            raise FileNotFoundError(f"{os.fspath(path)!r} does not exist: a calibration file was expected; {made}") from None
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)!r} is no calibration file of `qkvcache calibrate`: {error}") from None
        if not isinstance(content, dict) or content.get("file") != FILE:
            raise ValueError(f"{os.fspath(path)!r} is no calibration file of `qkvcache calibrate`: it does not begin with {FILE!r}")
        if content.get("version") != VERSION:
            raise ValueError(f"{os.fspath(path)!r} has version {content.get('version')!r}: this release reads {VERSION}; calibrate again")
        try:
            return cls(tuple(CLASSES[of.pop("format")](**of) for of in content["formats"]))
        except (KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{os.fspath(path)!r} is damaged: {error!r} in formats={content.get('formats')!r}") from error
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)!r}: {error}") from error


FormatLike = str | os.PathLike[str] | Format | FormatByLayer | Sequence[str | Format]
"""Values of `format=` of a cache: a registered name, a Format, a sequence of these, one for each
full-attention layer, or the path of a calibration file."""


def resolve(format: FormatLike) -> Format | FormatByLayer:
    """The format that `format=` of a cache names. A string that ends with `.json` or has a path separator is
    the path of a calibration file.

    Raises:
        ValueError: an unknown name, an empty sequence, a file that is no calibration file.
        TypeError: another type.
        OSError: a path that cannot be read.
    """
    if isinstance(format, Format | FormatByLayer):
        return format
    if isinstance(format, os.PathLike):
        return FormatByLayer.load(format)
    if isinstance(format, str):
        return FormatByLayer.load(format) if format.endswith(".json") or os.sep in format else named(format)
    if isinstance(format, Sequence):
        return FormatByLayer(tuple(named(each) if isinstance(each, str) else each for each in format))
    raise TypeError(
        f"format={format!r}: expected a name or a qkvcache.formats.Format, a sequence of these, or the path of a calibration file, not "
        f"{type(format).__name__}"
    )
