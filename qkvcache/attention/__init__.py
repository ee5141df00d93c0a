"""Attention of transformers models over compressed keys and values."""

from .attach import Attachment, attach, detach
from .compressed_kv import CompressedKV
from .route import install, installed, uninstall

__all__ = ["Attachment", "CompressedKV", "attach", "detach", "install", "installed", "uninstall"]
