"""A model over all devices that accelerate finds, with a compressed cache: each layer's part lies where the layer is.

python examples/device_map.py --model MODEL --cache turboquant_4bit_nc
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qkvcache import CompressedCache, demo, models


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--cache", default="turboquant_4bit_nc")
    parser.add_argument("--device-map", default="auto", help="auto, balanced, sequential")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args(arguments)

    path = models.folder(args.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype), device_map=args.device_map).eval()
    prompt = f"The code word of Anna is dilzon. {demo.text()[:4000]}\n\nWhat is the code word of Anna? The code word of Anna is"
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    cache = CompressedCache(model.config, format=args.cache)
    out = model.generate(**inputs, cache=cache, max_new_tokens=8, do_sample=False)
    held: Counter[str] = Counter()
    for layer in cache.layers:
        for _, tensor in layer.tensors():
            held[str(tensor.device)] += tensor.untyped_storage().nbytes()
    answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    print(answer.strip())
    for device, size in held.items():
        print(f"{device}: {size / 1e6:.2f} MB of the cache")
    return {"answer": answer, "bytes": dict(held)}


if __name__ == "__main__":
    main()
