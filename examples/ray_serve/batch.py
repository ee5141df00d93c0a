"""Many prompts over the nodes of a Ray cluster, with Ray Data: a model with compressed pages on each GPU.

    python examples/ray_serve/batch.py prompts.jsonl answers --model MODEL --replicas 4 --gpus 1
    ray job submit -- python examples/ray_serve/batch.py s3://bucket/prompts.jsonl s3://bucket/answers ...

Each line of the input has a `prompt`; the answers are JSON lines with the prompt, its `answer` and all other fields.
Ray reads, runs and writes the blocks of the data as GPUs are free, and runs those of a lost node again.
"""

import argparse
from typing import Any

import ray
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from qkvcache import continuous_batching, models


class Generate:
    """A model; each call answers a batch of prompts."""

    def __init__(self, args: argparse.Namespace):
        self.model, self.tokenizer = models.load(args.model, torch.bfloat16, "cuda" if args.gpus else "cpu")
        self.batching = continuous_batching(self.model, format=args.format)
        self.options: dict[str, Any] = {
            "generation_config": GenerationConfig(
                do_sample=False, max_new_tokens=args.new_tokens, eos_token_id=self.tokenizer.eos_token_id
            ),
            "continuous_batching_config": ContinuousBatchingConfig(num_blocks=args.pages),
        }

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        inputs = [self.tokenizer(prompt)["input_ids"] for prompt in batch["prompt"]]
        outputs = self.model.generate_batch(inputs, **self.options)
        batch["answer"] = [self.tokenizer.decode(output.generated_tokens, skip_special_tokens=True) for output in outputs.values()]
        return batch


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("answers", help="a folder")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--format", default="turboquant_4bit_nc")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0, help="of a replica")
    parser.add_argument("--together", type=int, default=512, help="prompts of a batch: more of them keep the pages of a GPU full")
    parser.add_argument("--pages", type=int, help="of 256 tokens; without it, what is free. Needed on a CPU")
    args = parser.parse_args(arguments)
    options = {"batch_size": args.together, "compute": ray.data.ActorPoolStrategy(size=args.replicas), "num_gpus": args.gpus}
    prompts = ray.data.read_json(args.prompts, lines=True)
    prompts.map_batches(Generate, fn_constructor_args=(args,), **options).write_json(args.answers)


if __name__ == "__main__":
    main()
