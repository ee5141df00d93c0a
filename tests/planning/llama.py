"""The shape of Llama 3.1 70B."""

from transformers import LlamaConfig

LLAMA_70B = LlamaConfig(
    hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, vocab_size=128_256,
    max_position_embeddings=131_072,
)  # fmt: skip
