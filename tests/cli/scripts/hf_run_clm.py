"""Causal language modeling with the transformers Trainer and its argument parser."""

import sys
from dataclasses import dataclass, field

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class ModelArguments:
    n_layer: int = field(default=2)
    block_size: int = field(default=32)


class Blocks(torch.utils.data.Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(64, (16, size), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i].clone()}


def main():
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    model_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    config = GPT2Config(
        n_layer=model_args.n_layer, n_embd=32, n_head=2, n_positions=model_args.block_size, vocab_size=64,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    trainer = Trainer(model=model, args=training_args, train_dataset=Blocks(model_args.block_size))
    result = trainer.train()
    print(
        f"train_loss {result.training_loss:.8f}",
        [f"{entry['loss']:.8f}" for entry in trainer.state.log_history if "loss" in entry],
    )


if __name__ == "__main__":
    sys.exit(main())
