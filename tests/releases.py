"""What the installed release of transformers has."""

import transformers
from packaging.version import Version

BATCHING = Version(transformers.__version__).release >= (5, 24)
"""Whether models pass their keys and values to a paged cache, as compressed pages need it."""
