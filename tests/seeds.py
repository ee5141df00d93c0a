"""One number that moves every random draw of the tests: `QKVCACHE_TEST_SEED=1 pytest`."""

import os

SEED = int(os.environ.get("QKVCACHE_TEST_SEED", "0"))
"""Added to every seed. A test that holds for 0 alone is a defect."""
