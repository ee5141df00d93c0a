"""One process of `test_ranks.py`: two ranks that hold different entries go on from the same token."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from qkvcache import PrefixStore
from qkvcache.releases import passing
from tests.seeds import SEED


def main(checkpoint: str, folder: str) -> None:
    torch.set_num_threads(1)
    network = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, tp_plan="auto").eval()
    rank = torch.distributed.get_rank()
    options = {"max_bytes": 2**26, "format": "identity", "directory": folder}
    store = PrefixStore(network, **options)
    torch.manual_seed(SEED)
    ids = torch.randint(3, 100, (1, 60))
    lengths, answers = [], []
    for end in (40, 60):
        with store.reuse(ids[:, :end]) as past:
            lengths.append(past.get_seq_length())
            answers.append(network.generate(ids[:, :end], **passing(past), max_new_tokens=4, do_sample=False).tolist())
    torch.distributed.barrier()
    again = PrefixStore(network, **options)
    lengths.append(again.fetch(ids).length)
    if rank == 0:  # what this rank had is gone, and the other one must do without as well
        store.trim(0)
        for path in Path(folder).iterdir():
            if path.name.startswith(store._identity.name.hex()):
                path.unlink()
    torch.distributed.barrier()
    lengths.append(again.fetch(ids).length)
    kept = PrefixStore(network, max_bytes=2**26, format="identity")
    cache = store._templates.own.cache()
    with torch.no_grad():
        network(ids, **passing(cache))
    kept.store(ids[:, : 30 + 20 * rank], cache)
    lengths.append(kept.fetch(ids).length)
    Path(folder, f"rank{rank}.json").write_text(json.dumps([lengths, answers, len(list(Path(folder).glob("*.safetensors")))]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:3])
