"""GRPO with rollouts through a compressed cache, by TRL's trainer on the embedded model: minutes on a CPU.

    pip install '.[rl]'
    python examples/grpo.py --format turboquant_4bit_nc --steps 30

A compressed cache samples from a policy that is a little other than the one that is trained. `CompressedGRPO` therefore gives the
log-probabilities under which tokens were sampled to the loss: its ratio is then the importance weight, and its clipping bounds it.
"""

from __future__ import annotations

import argparse
import random
import tempfile

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.models import unwrap_model_for_generation

from qkvcache import CompressedCache, demo


class CompressedGRPO(GRPOTrainer):
    """TRL's trainer with rollouts through a cache in `cache_format`, whose log-probabilities are the old ones of the loss."""

    def __init__(self, *args, cache_format: str, **options):
        super().__init__(*args, rollout_func=rollout, **options)
        self.cache_format = cache_format

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict[str, torch.Tensor]:
        return (out := super()._generate_and_score_completions(inputs)) | {"old_per_token_logps": out["sampling_per_token_logps"]}


@torch.no_grad()
def rollout(prompts: list[str], trainer: CompressedGRPO) -> dict[str, list]:
    """The token ids of `prompts` and of their answers, with the log-probabilities under which the answers were sampled."""
    args, tokenizer = trainer.args, trainer.processing_class
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    # Gradient checkpointing, which is off in here, drops every cache.
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
        inputs = inputs.to(model.device)
        out = model.generate(
            **inputs, cache=CompressedCache(model.config, format=trainer.cache_format), return_dict_in_generate=True,
            output_logits=True, max_new_tokens=args.max_completion_length, do_sample=True, temperature=args.temperature, top_k=0,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    answers = out.sequences[:, inputs["input_ids"].shape[1] :]
    log_probs = (torch.stack(out.logits, dim=1).float() / args.temperature).log_softmax(-1).gather(-1, answers[..., None])[..., 0]
    ended = answers == tokenizer.eos_token_id
    lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, answers.shape[1]).tolist()
    return {
        "prompt_ids": [ids[seen.bool()].tolist() for ids, seen in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)],
        "completion_ids": [ids[:length].tolist() for ids, length in zip(answers, lengths, strict=True)],
        "logprobs": [row[:length].tolist() for row, length in zip(log_probs, lengths, strict=True)],
    }


def vowels(completions: list[str], **_) -> list[float]:
    """A reward that a small model can learn in minutes: the share of letters that are vowels."""
    letters = [[c for c in text.lower() if c.isalpha()] for text in completions]
    return [sum(c in "aeiou" for c in text) / max(len(text), 1) for text in letters]


def main(arguments: list[str] | None = None) -> list[float]:
    """The rewards that the trainer logs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="turboquant_4bit_nc", help="of the rollouts' cache; identity: not compressed")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompt-tokens", type=int, default=400)
    args = parser.parse_args(arguments)
    model, tokenizer = demo.load()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    ids, rng = demo.text_ids(tokenizer), random.Random(0)
    starts = [rng.randrange(len(ids) - args.prompt_tokens) for _ in range(256)]
    prompts = Dataset.from_dict({"prompt": [tokenizer.decode(ids[at : at + args.prompt_tokens]) for at in starts]})
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder, per_device_train_batch_size=16, num_generations=8, max_completion_length=32, learning_rate=1e-3, max_steps=args.steps,
            logging_steps=5, save_strategy="no", report_to="none", use_cpu=not torch.cuda.is_available(), beta=0.0, bf16=False,
        )  # fmt: skip
        trainer = CompressedGRPO(
            model=model, processing_class=tokenizer, reward_funcs=vowels, args=config, train_dataset=prompts, cache_format=args.format
        )
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f} with rollouts in {args.format}")
    return rewards


if __name__ == "__main__":
    main()
