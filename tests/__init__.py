"""Tests, and what they share: `from tests.matrix import FORMATS`."""
