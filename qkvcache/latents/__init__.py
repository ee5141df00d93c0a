"""Models that cache latents (MLA), and layers with an indexer."""
