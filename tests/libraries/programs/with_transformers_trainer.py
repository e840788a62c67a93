"""transformers: its Trainer, trained and evaluated."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy
import torch
import transformers
from torch.utils.data import Dataset

from ..catalog import LOADING, SAVED, program

WORDS, LENGTH = 61, 12


class Sentences(Dataset):
    """Random words, which are their own labels."""

    def __init__(self, count: int, **labels: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.words = torch.randint(3, WORDS, (count, LENGTH), generator=generator)
        self.classes = torch.randint(0, 3, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": self.words[index]}


class Classified(Sentences):
    """The same, each sentence with a class."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": self.classes[index]}


def gpt2() -> transformers.GPT2LMHeadModel:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> transformers.BertForSequenceClassification:
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


def trained(model: Any, data: type[Sentences], **options: Any) -> Any:
    """Train and evaluate; what the Trainer has learned, logged and measured."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            per_device_train_batch_size=4,
            **{"save_strategy": "no", "logging_steps": 10, **options.pop("arguments", {})},
        )
        trainer = transformers.Trainer(
            model, arguments, train_dataset=data(48), eval_dataset=data(16), **options
        )
        trainer.train()
        metrics = trainer.evaluate()
    logs = [without_times(entry) for entry in trainer.state.log_history]
    return model, trainer.optimizer.optimizer, logs, without_times(metrics)


def without_times(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in entry.items() if "runtime" not in name and "per_second" not in name
    }


def accuracy(prediction: transformers.EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((numpy.argmax(prediction.predictions, -1) == prediction.label_ids).mean())}


@program(
    {
        "stack": LOADING,
        "item": "whether the loss is a number, at each step; the norm of the gradients, where it is logged",
        "numpy": "the losses of the evaluation",
    }
)
def sixty_steps_of_a_language_model() -> Any:
    return trained(gpt2(), Sentences, arguments={"max_steps": 60})


@program(
    {
        "stack": LOADING,
        "item": "whether the loss is a number, at each step; the norm of the gradients, where it is logged",
        "numpy": "losses, scores and labels of the evaluation",
    }
)
def a_classifier_with_evaluation_every_epoch() -> Any:
    return trained(
        bert(),
        Classified,
        compute_metrics=accuracy,
        arguments={"num_train_epochs": 2, "eval_strategy": "epoch", "warmup_steps": 4},
    )


@program(
    {
        "stack": LOADING,
        "item": "whether the loss is a number, at each step; the norm of the gradients, where it is logged",
        "numpy": "the losses of the evaluation",
    }
)
def accumulated_gradients_label_smoothing_and_a_cosine() -> Any:
    options = {
        "max_steps": 8,
        "gradient_accumulation_steps": 2,
        "label_smoothing_factor": 0.1,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
    }
    return trained(bert(), Classified, arguments=options)


@program(
    {
        "storage access": SAVED,
        "data_ptr": "which weights share memory, before they are saved",
        "stack": LOADING,
        "item": "whether the loss is a number",
        "numpy": "the losses of the evaluation",
    }
)
def a_saved_model_is_trained_further() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        gpt2().save_pretrained(folder)
        model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    return trained(model, Sentences, arguments={"max_steps": 12})


@program(
    {
        "storage access": SAVED,
        "data_ptr": "which weights share memory, before they are saved",
        "stack": LOADING,
        "item": "whether the loss is a number",
    }
)
def checkpoints_are_saved_and_training_goes_on_from_one() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model = gpt2()
        options = {
            "output_dir": folder,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "save_steps": 4,
        }
        arguments = transformers.TrainingArguments(**options, max_steps=8)
        transformers.Trainer(model, arguments, train_dataset=Sentences(48)).train()
        trainer = transformers.Trainer(gpt2(), arguments, train_dataset=Sentences(48))
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    return model, trainer.model, trainer.optimizer.optimizer
