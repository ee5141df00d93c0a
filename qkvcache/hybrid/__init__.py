"""Layers with a recurrent state beside attention."""
