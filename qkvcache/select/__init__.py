"""Attention that reads the tokens that matter to a query (`attention_budget`), and the others in host memory (`offload_pages`)."""
