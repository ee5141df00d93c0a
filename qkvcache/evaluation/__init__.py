"""How good a cache is: recall of planted facts, and divergence from the dense run."""
