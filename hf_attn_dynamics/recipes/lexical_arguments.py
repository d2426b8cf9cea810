# Licensed under the Apache License, Version 2.0.
"""Arguments of `lexical_knowledge.py`, and the sizes that its models have when none are given."""

from dataclasses import dataclass, field
from typing import ClassVar

from transformers import TrainingArguments

from .arguments.base import refuse_flags
from .arguments.lexical_knowledge import LEXICAL_SIZES, LexicalArguments
from .run import cpu_only


@dataclass
class LexicalTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the paper's defaults: Adam with the rate 1e-3, which stays, and no clipping.

    These defaults differ: `output_dir` runs/lexical_knowledge, `learning_rate` 1e-3, `lr_scheduler_type` constant,
    `max_grad_norm` 0, `max_steps` and `per_device_train_batch_size` as [`LEXICAL_SIZES`] has them,
    `per_device_eval_batch_size` 128, `save_strategy` no, `report_to` none.
    """

    output_dir: str = field(
        default="runs/lexical_knowledge", metadata={"help": "Where to write; may not hold another run."}
    )
    max_steps: int | None = field(default=None, metadata={"help": "Steps of each model."})
    per_device_train_batch_size: int | None = field(default=None, metadata={"help": "Examples of a training batch."})
    per_device_eval_batch_size: int = field(default=128, metadata={"help": "Examples that are measured together."})
    learning_rate: float = field(default=1e-3, metadata={"help": "Learning rate."})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "How the learning rate changes."})
    max_grad_norm: float = field(default=0.0, metadata={"help": "Gradients are clipped to this norm; 0: never."})
    save_strategy: str = field(default="no", metadata={"help": "Finished models are kept in any case."})
    report_to: str | None = field(default="none", metadata={"help": "Trackers to report to."})

    # Flags that the recipe does not read -> what to do, instead.
    without_effect: ClassVar[dict[str, str]] = {
        "num_train_epochs": "set max_steps",
        "eval_strategy": "set checkpoints",
        "eval_steps": "set checkpoints",
    }

    def __post_init__(self):
        self.use_cpu = self.use_cpu or cpu_only()
        refuse_flags(self, self.without_effect)
        super().__post_init__()


def choose_sizes(args: LexicalArguments, training_args: LexicalTrainingArguments) -> None:
    """Sets what was not given: see [`LEXICAL_SIZES`]."""
    for name, value in LEXICAL_SIZES[args.task]["embedded" if args.is_embedded else "paper"].items():
        owner = args if hasattr(args, name) else training_args
        if getattr(owner, name) is None:
            setattr(owner, name, value)
