"""How compressed keys and values enter a transformers model."""

from .attach import Attachment, attach, detach
from .handle import KVHandle
from .route import install, installed, uninstall

__all__ = ["Attachment", "KVHandle", "attach", "detach", "install", "installed", "uninstall"]
