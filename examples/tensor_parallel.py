"""A model split over processes, each of which holds the compressed cache of its own KV heads.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py --model MODEL --cache turboquant_4bit_nc

It runs on CPUs too. The number of processes must divide the model's KV heads.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qkvcache import CompressedCache, demo, models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--cache", default="turboquant_4bit_nc")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()

    path = models.folder(args.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype), tp_plan="auto").eval()
    prompt = f"The code word of Anna is dilzon. {demo.text()[:4000]}\n\nWhat is the code word of Anna? The code word of Anna is"
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    cache = CompressedCache(model.config, format=args.cache)
    out = model.generate(**inputs, cache=cache, max_new_tokens=8, do_sample=False)
    answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :]).strip()
    rank, heads = torch.distributed.get_rank(), cache.layers[0].dense()[0].shape[1]
    print(f"rank {rank}: {heads} KV heads, {cache.nbytes / 1e6:.2f} MB: {answer.splitlines()[0]}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
