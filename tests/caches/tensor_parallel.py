"""One process of `test_devices.py::test_tensor_parallelism`: logits of a tensor-parallel model with a compressed cache, saved by rank 0."""

import sys

import torch
from transformers import AutoModelForCausalLM

from qkvcache import CompressedCache
from qkvcache.releases import passing
from tests.seeds import SEED


def main(checkpoint: str, output: str, plan: str | None) -> None:
    torch.set_num_threads(1)
    parallel = plan == "auto"
    network = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, **({"tp_plan": "auto"} if parallel else {})).eval()
    torch.manual_seed(SEED)
    ids = torch.randint(3, 100, (2, 40))
    result = {}
    for format in ("identity", "turboquant_4bit_nc"):
        cache = CompressedCache(network.config, format=format, num_sink_tokens=2, residual_length=4)
        with torch.no_grad():
            steps = [network(ids[:, a:b], **passing(cache)).logits for a, b in ((0, 30), (30, 36), (36, 37), (37, 40))]
        result[format] = torch.cat(steps, dim=1)
        result[f"{format} heads"] = cache.layers[0].storage.sinks[0].shape[1]
    if not parallel or torch.distributed.get_rank() == 0:
        torch.save(result, output)
    if parallel:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4])
