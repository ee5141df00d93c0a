"""Attention of transformers models over compressed keys and values."""

from .compressed_kv import CompressedKV
from .route import install, installed, uninstall

__all__ = ["CompressedKV", "install", "installed", "uninstall"]
