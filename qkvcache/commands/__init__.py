"""The commands of `qkvcache`. Heavy modules are imported within a command, so that `--help` is fast."""
