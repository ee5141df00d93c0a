"""Eviction: policies that forget tokens on purpose, and the caches that follow them."""
