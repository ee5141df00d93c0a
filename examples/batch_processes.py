"""Many prompts over several GPUs with nothing but `multiprocessing`: a process for each GPU takes prompts from one queue.

    python examples/batch_processes.py --model MODEL --devices cuda:0 cuda:1
    python examples/batch_processes.py --devices cpu

Requests join a running batch as others end, so that no process waits for another one. Behind an address it is the same: start a server for
each GPU (`CUDA_VISIBLE_DEVICES=1 qkvcache serve MODEL --port 8001`), and any proxy in front of them.
"""

from __future__ import annotations

import argparse
from queue import Empty

import torch
from torch import multiprocessing
from transformers import ContinuousBatchingConfig, GenerationConfig

from qkvcache import continuous_batching, demo, models


def work(device: str, args: argparse.Namespace, asked: multiprocessing.Queue, answers: multiprocessing.Queue) -> None:
    """One process: adds a request whenever fewer than `args.together` run, until there are no more prompts."""
    model, tokenizer = models.load(args.model, torch.bfloat16, device)
    greedy = GenerationConfig(do_sample=False, max_new_tokens=args.new_tokens, eos_token_id=-1)
    config = ContinuousBatchingConfig(num_blocks=args.pages, max_batch_tokens=1024)
    with (
        continuous_batching(model, format=args.format),
        model.continuous_batching_context_manager(greedy, continuous_batching_config=config) as manager,
    ):
        running, left = 0, True
        while running or left:
            while left and running < args.together:
                try:
                    number, prompt = asked.get(timeout=0.1)
                except Empty:
                    left = False
                    break
                manager.add_request(tokenizer(prompt)["input_ids"], request_id=str(number))
                running += 1
            if running and (result := manager.get_result(timeout=1)):
                running -= 1
                answers.put((int(result.request_id), device, tokenizer.decode(result.generated_tokens)))


def main(arguments: list[str] | None = None) -> dict[int, str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=["cpu"])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--format", default="turboquant_4bit_nc")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--together", type=int, default=64, help="requests of one GPU at once")
    parser.add_argument("--pages", type=int, default=64, help="of 256 tokens, on each GPU")
    args = parser.parse_args(arguments)

    spawn, text = multiprocessing.get_context("spawn"), demo.text()
    asked, answers = spawn.Queue(), spawn.Queue()
    ask = "The code word of Anna is dilzon. {}\n\nWhat is the code word of Anna? The code word of Anna is"
    for i in range(args.prompts):
        asked.put((i, ask.format(text[900 * i : 900 * i + 300])))
    processes = [spawn.Process(target=work, args=(device, args, asked, answers), daemon=True) for device in args.devices]
    for process in processes:
        process.start()
    found = {}
    while len(found) < args.prompts:
        try:
            number, device, answer = answers.get(timeout=5)
        except Empty:
            if any(process.exitcode for process in processes):
                raise RuntimeError("a process failed: see what it printed") from None
            continue
        found[number] = answer
        print(f"prompt {number} on {device}: {answer!r}", flush=True)
    for process in processes:
        process.join()
    return found


if __name__ == "__main__":
    main()
