"""Many prompts over several GPUs: a copy of the model on each, each with compressed pages of its own.

    accelerate launch --num-processes 2 examples/batch_accelerate.py --model MODEL            two GPUs
    torchrun --nproc-per-node 2 examples/batch_accelerate.py                                  two processes on a CPU

accelerate starts the processes and splits the prompts; each process batches its share continuously.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import ContinuousBatchingConfig, GenerationConfig

from qkvcache import continuous_batching, demo, models


def main(arguments: list[str] | None = None) -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--format", default="turboquant_4bit_nc")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--pages", type=int, default=64, help="of 256 tokens, on each GPU")
    args = parser.parse_args(arguments)

    state = PartialState(cpu=not torch.cuda.is_available())
    model, tokenizer = models.load(args.model, torch.bfloat16, state.device)
    text = demo.text()
    ask = "The code word of Anna is dilzon. {}\n\nWhat is the code word of Anna? The code word of Anna is"
    asked = [ask.format(text[900 * i : 900 * i + 300]) for i in range(args.prompts)]
    greedy = GenerationConfig(do_sample=False, max_new_tokens=args.new_tokens, eos_token_id=-1)
    config = ContinuousBatchingConfig(num_blocks=args.pages, max_batch_tokens=1024)
    with state.split_between_processes(asked) as mine, continuous_batching(model, format=args.format):
        inputs = [tokenizer(prompt)["input_ids"] for prompt in mine]
        outputs = model.generate_batch(inputs, generation_config=greedy, continuous_batching_config=config)
    answers = gather_object([tokenizer.decode(output.generated_tokens) for output in outputs.values()])
    print(f"process {state.process_index} of {state.num_processes} on {state.device}: {len(inputs)} prompts", flush=True)
    if state.is_main_process:
        print(f"{len(answers)} answers, the first of them {answers[0]!r}", flush=True)
    state.destroy_process_group()
    return answers


if __name__ == "__main__":
    main()
