"""The files recipes/configs/NAME.yaml, written from the flags of the recipes; run it to write them anew."""

import dataclasses
import importlib
import textwrap
import typing
from pathlib import Path
from typing import Any

import yaml

from hf_attn_dynamics.recipes import JOBS
from hf_attn_dynamics.recipes.arguments.parsing import parse_yaml_or_flags


FOLDER = Path(__file__).parents[2] / "recipes" / "configs"

PUSH = ("push_to_hub", "hub_model_id")
STEPS = ("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate")
LOGS = ("logging_steps", "save_steps")
EPOCHS = ("num_train_epochs", *STEPS[1:2], "learning_rate", "layer_rate_decay", "ema_decay", "warmup_steps")
SCHEDULE = ("warmup_steps", "lr_scheduler_type", "adam_beta2", "label_smoothing_factor", "train_sampling_strategy")
GATES = ("gate_learning_rate", "target_warmup", "target_learning_rate")
GUIDANCE = ("guidance_weight", "guidance_schedule")
TRANSLATION = (*STEPS, *SCHEDULE, "max_grad_norm", *LOGS, "per_device_eval_batch_size", "generation_max_length")
# Flags of the trainer in the file of each recipe; those with a trainer have output_dir and seed, too.
TRAINER_FLAGS = {
    "pretrain_ag": (*PUSH, *GUIDANCE, *STEPS, "adam_beta2", "weight_decay", "max_grad_norm", "eval_steps", *LOGS),
    "finetune": (*PUSH, *EPOCHS, "guidance_weight"),
    "run_glue": (*PUSH, *EPOCHS, "guidance_weight"),
    "supervise_mlm": (
        *PUSH, *GUIDANCE, "num_train_epochs", *STEPS, "warmup_steps", "eval_strategy", "eval_steps", *LOGS,
    ),
    "supervise_classifier": (*PUSH, *GUIDANCE, *EPOCHS),
    "distil_heads": (
        "distillation_weight", "distillation_temperature", *GUIDANCE, *EPOCHS, "eval_strategy", "eval_steps",
    ),
    "prune_heads": (*PUSH, *GATES, *EPOCHS),
    "compare_translation": ("bf16", *GUIDANCE, *TRANSLATION, "eval_strategy", "eval_steps"),
    "align_translation": ("bf16", *GUIDANCE, *TRANSLATION, "eval_strategy", "eval_steps"),
    "train_translation": (*PUSH, "gate_penalty", *GATES, *TRANSLATION),
    "train_lstm_translation": (*PUSH, *TRANSLATION, "eval_steps"),
    "lexical_knowledge": (
        "max_steps", "per_device_train_batch_size", "per_device_eval_batch_size", "learning_rate", "lr_scheduler_type",
        "max_grad_norm", "save_strategy", "disable_tqdm",
    ),
}  # fmt: skip


# Recipes push once, at their end.
OWN_WORDS = {
    "push_to_hub": "Push the model to the Hub at the end of the run.",
    "hub_model_id": "Repository on the Hub, USER/NAME; by default, it is named after output_dir.",
}


def configured() -> list[str]:
    """Recipes whose flags are a dataclass, and whose other words of the command line are none."""
    return [name for name in JOBS if name not in ("sweep", "merge_curves", "redraw", "reproduction")]


def text(name: str) -> str:
    """The file of a recipe."""
    recipe = importlib.import_module(f"hf_attn_dynamics.recipes.{name}")
    arguments = importlib.import_module(f"hf_attn_dynamics.recipes.arguments.{name}")
    types = [kind for kind in typing.get_type_hints(recipe.main).values() if dataclasses.is_dataclass(kind)]
    values = parse_yaml_or_flags(*types, presets=arguments.PRESETS, argv=[])
    sections = _sections(types[0], values[0])
    if len(types) > 1:
        names = ("output_dir", "seed", *TRAINER_FLAGS[name])
        fields = types[1].__dataclass_fields__
        sections["Flags of the trainer."] = [(fields[one], getattr(values[1], one)) for one in names]
    lines = [
        f"# {recipe.__doc__.partition(chr(10))[0]}",
        "# The values are those of the demonstration. Flags on the command line override this file.",
        *["# All keys of `transformers.TrainingArguments` may be added."] * (len(types) > 1),
        "#",
        f"#     accelerate launch recipes/{name}.py recipes/configs/{name}.yaml --output_dir runs/mine",
    ]
    for title, entries in sections.items():
        lines += ["", f"# ---- {title.rstrip('.')} ".ljust(100, "-")]
        for field, value in entries:
            words = OWN_WORDS.get(field.name, field.metadata["help"])
            lines += [f"# {line}" for line in textwrap.wrap(" ".join(words.split()), 110)]
            lines += [f"{field.name}: {_in_yaml(value)}"]
    return "\n".join(lines) + "\n"


def _sections(kind: type, values: Any) -> dict[str, list]:
    """Flags and values, by the first sentence about the class that declares them; the recipe's own come first."""
    classes = [one for one in kind.__mro__ if dataclasses.is_dataclass(one)]
    sections: dict[str, list] = {one.__doc__.partition("\n")[0].partition("; [`")[0]: [] for one in classes}
    for field in dataclasses.fields(kind):
        if field.metadata["help"] == "==SUPPRESS==":
            continue
        owner = [one for one in classes if field.name in vars(one).get("__annotations__", {})][-1]
        sections[owner.__doc__.partition("\n")[0].partition("; [`")[0]].append((field, getattr(values, field.name)))
    return {title: entries for title, entries in sections.items() if entries}


def _in_yaml(value: Any) -> str:
    value = getattr(value, "value", value)  # of an enumeration
    return yaml.safe_dump(value, default_flow_style=True, width=1000, allow_unicode=True).removesuffix("...\n").strip()


if __name__ == "__main__":
    for recipe in configured():
        (FOLDER / f"{recipe}.yaml").write_text(text(recipe), encoding="utf-8")
