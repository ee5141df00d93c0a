"""One process of `test_ranks.py`: scores of a model that is spread over the ranks, saved by the first."""

import sys

import torch

from qkvcache.evaluation.model import CacheLM
from tests.evaluation.asked import SHORT, score, token_requests


def main(checkpoint: str, output: str) -> None:
    torch.set_num_threads(1)
    found = {}
    for cache in ("dynamic", "turboquant_4bit_nc"):
        zones = {} if cache == "dynamic" else SHORT
        lm = CacheLM(checkpoint, cache=cache, batch_size=4, device="cpu", dtype="float32", tp_plan="auto", **zones)
        found[cache] = score(lm, token_requests())
        found[f"{cache} info"] = lm.get_model_info()
    if torch.distributed.get_rank() == 0:
        torch.save(found, output)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3])
