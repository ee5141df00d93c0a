"""Attention of transformers models over compressed keys and values."""

from .attach import Attachment, attach, detach
from .compressed_kv import CompressedKV
from .latents import absorb
from .route import install, installed, uninstall

__all__ = ["Attachment", "CompressedKV", "absorb", "attach", "detach", "install", "installed", "uninstall"]
