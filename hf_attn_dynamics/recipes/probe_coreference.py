# Licensed under the Apache License, Version 2.0.
"""Ask each attention head whether it finds what a pronoun, name or noun phrase refers back to.

    accelerate launch recipes/probe_coreference.py                             # a demonstration on embedded sentences
    accelerate launch recipes/probe_coreference.py --models guided=runs/guided/model bert=bert-base-uncased \\
        --data open_sesame:refl.0.gz winobias:wino/data conll2012:conll-2012/dev --random_seeds 0 1 2

The probe of Deshpande & Narasimhan (2020, section 5.6) after Clark et al. (2019): a head is right where it attends
most from a mention to an antecedent. Reported is the best head of each model. Models may be of any architecture that
`AutoModel` opens and `locate_heads` knows. The demonstration has a tiny model with random weights: it shows how
the recipe works, and nothing about coreference.

Kinds of data: `open_sesame` (Lin et al. 2019; a file such as `refl.0.gz`), of which sentences with one token a word
are kept, with a clause about others before them; `winobias` (a folder or a file); `winogender` (`templates.tsv`, or
its folder); `conll2012`, for which only heads of mentions compete, as in Clark et al.; elsewhere all words and special
tokens do. Tokenizers differ in which sentences they keep: compare `items`.

Writes to `--output_dir`: `summary.json`, `table.csv` (a row for each model and baseline, as table 8 of the paper),
`heads.png` and `.svg` (accuracy of each head), `config.yaml` (the values of the run), `scores/MODEL/DATA.json` (every
head, read by `CoreferenceScores.load`).

Keys of `summary.json`:
    rows            for each model, data and group of items: model, data, group, items (their number), best, site,
                    layer, head (the best head, and its accuracy), mean (of all heads), skipped (items of the data),
                    and the baselines previous_word, first_word, nearest_mention, chance
    models, data    names, in their order
    special_tokens, mentions_only        what competed, by data
    num_processes, and seed, device, command and versions
"""

import random
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModel,
    BertConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .. import CoreferenceScores, coreference_accuracy
from ..analysis.plots.base import plot_head_maps
from ..data import (
    CoreferenceItem,
    add_distractors,
    embedded_coreference,
    load_coreference,
    single_token_items,
    train_byte_level_bpe,
)
from ..data.coreference import POSITIONS, READERS
from .checkpoints import load_checkpoint, load_config, load_tokenizer
from .run import (
    NOT_OF_THE_RUN,
    SUMMARY,
    RunArguments,
    begin_run,
    check_names,
    check_output_dir,
    device_name,
    format_table,
    provenance,
    refuse_bad_input,
    run_recipe,
    share_out,
    start_processes,
    write_csv,
    write_json,
)


TINY, EMBEDDED = "tiny", "embedded"
COMPETING = ("special_tokens", "mentions_only")
BASELINES = ("previous word", "first word", "nearest mention", "chance")
Model = tuple[Callable[[], PreTrainedModel], PreTrainedTokenizerBase]


@dataclass
class ProbeArguments(RunArguments):
    """Models, data, and what competes for the attention of a head."""

    output_dir: str = field(
        default="runs/probe_coreference", metadata={"help": "Where to write; may not hold another run."}
    )
    models: list[str] | None = field(
        default=None, metadata={"help": "NAME=CHECKPOINT (folder, or name on the Hub); without, a tiny random BERT."}
    )
    data: list[str] | None = field(
        default=None, metadata={"help": f"KIND:PATH, kinds are {', '.join(READERS)}; without, embedded sentences."}
    )
    random_seeds: list[int] | None = field(
        default=None, metadata={"help": "Beside each model, one with random weights for each of these seeds."}
    )
    special_tokens: bool | None = field(
        default=None, metadata={"help": "Whether special tokens compete; by default not for conll2012."}
    )
    mentions_only: bool | None = field(
        default=None, metadata={"help": "Whether only heads of mentions compete; by default for conll2012."}
    )
    distractor: str = field(
        default="before", metadata={"help": "Clause about others in open_sesame: before, after or none."}
    )
    max_items: int | None = field(default=None, metadata={"help": "Items drawn from each data set; all by default."})
    batch_size: int = field(default=32, metadata={"help": "Texts of a batch."})
    seed: int = field(default=42, metadata={"help": "Of clauses and items that are drawn, and of the tiny model."})
    disable_tqdm: bool = field(default=False, metadata={"help": "No progress bars."})

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "batch_size", "max_items")
        if self.distractor not in (*POSITIONS, "none"):
            raise ValueError(f"distractor must be {', '.join(POSITIONS)} or none, got {self.distractor!r}.")
        if self.distractor == "after" and not any(one.startswith("open_sesame:") for one in self.data or ()):
            raise ValueError("distractor=after is of open_sesame, which data does not name; leave it out.")
        if self.random_seeds is not None:
            check_names("random_seeds", self.random_seeds)

    def named_models(self) -> dict[str, str | None]:
        """Checkpoints by name; `None` for the tiny model."""
        if not self.models:
            return {TINY: None}
        pairs = [_pair("models", one, "=", "NAME=CHECKPOINT") for one in self.models]
        for name, _ in pairs:
            # Names are folders of the run, and the models with random weights have names of their own.
            if not re.fullmatch(r"[\w.-]+", name) or re.search(r"-random\d+$", name):
                raise ValueError(
                    f"models names {name!r}; use letters, digits, '_', '-' and '.', and no '-random0' at the end."
                )
        return _without_repeats("models", pairs)

    def named_data(self) -> dict[str, tuple[str, str | None]]:
        """Kind and path of each data set by its name: the kind, and the file where a kind comes twice."""
        if not self.data:
            return {EMBEDDED: (EMBEDDED, None)}
        pairs = [_pair("data", one, ":", "KIND:PATH") for one in self.data]
        kinds = [kind for kind, _ in pairs]
        for kind in kinds:
            if kind not in READERS:
                raise ValueError(f"data {kind!r} is not one of {', '.join(READERS)}.")
        names = [kind if kinds.count(kind) == 1 else f"{kind}-{Path(path).name}" for kind, path in pairs]
        return _without_repeats("data", list(zip(names, pairs)))

    def competing(self, kind: str) -> dict[str, bool]:
        """What competes in data of this kind."""
        as_clark = kind == "conll2012"
        return {
            "special_tokens": not as_clark if self.special_tokens is None else self.special_tokens,
            "mentions_only": as_clark if self.mentions_only is None else self.mentions_only,
        }


def _pair(name: str, value: str, mark: str, form: str) -> tuple[str, str]:
    key, found, rest = value.partition(mark)
    if not (key and found and rest):
        raise ValueError(f"{name} must be {form}, got {value!r}.")
    return key, rest


def _without_repeats(argument: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{argument} names {name!r} twice.")
    return dict(pairs)


# ---------------------------------------------------------------------------------------------------------------------
# Models and data
# ---------------------------------------------------------------------------------------------------------------------


def load_models(args: ProbeArguments) -> dict[str, Model]:
    """What makes each model, and its tokenizer; weights are read when a model's turn comes."""
    models: dict[str, Model] = {}
    for name, checkpoint in args.named_models().items():
        if checkpoint is None:
            tokenizer, config = tiny_bert()
            models[name] = partial(random_model, config, args.seed), tokenizer
        else:
            config, tokenizer = load_config("models:", checkpoint), load_tokenizer("models:", checkpoint)
            models[name] = partial(load_checkpoint, "models:", checkpoint, config), tokenizer
        for seed in args.random_seeds or ():
            models[f"{name}-random{seed}"] = partial(random_model, config, seed), tokenizer
    return models


def random_model(config, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModel.from_config(config)


def tiny_bert() -> tuple[PreTrainedTokenizerBase, BertConfig]:
    tokenizer = train_byte_level_bpe([item.text for item in embedded_coreference()], vocab_size=500, kind="bert")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return tokenizer, BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes)


def load_data(args: ProbeArguments, models: dict[str, Model]) -> dict[tuple[str, str], list[CoreferenceItem]]:
    """Items of each model and data set, since tokenizers choose among the sentences of `open_sesame`."""
    found = {}
    for name, (kind, path) in args.named_data().items():
        items = embedded_coreference() if path is None else load_coreference(kind, path)
        if kind == "open_sesame" and args.distractor != "none":
            items = add_distractors(items, args.distractor, args.seed)
        chosen: dict[int, list[CoreferenceItem]] = {}
        for model, (_, tokenizer) in models.items():
            if id(tokenizer) not in chosen:
                kept = single_token_items(items, tokenizer) if kind == "open_sesame" else items
                if not kept:
                    raise ValueError(f"data {path!r}: no sentence has one token a word in the vocabulary of {model}.")
                chosen[id(tokenizer)] = sampled(kept, args)
            found[model, name] = chosen[id(tokenizer)]
    return found


def sampled(items: list[CoreferenceItem], args: ProbeArguments) -> list[CoreferenceItem]:
    if args.max_items is None or args.max_items >= len(items):
        return items
    places = random.Random(args.seed).sample(range(len(items)), args.max_items)
    return [items[place] for place in sorted(places)]


# ---------------------------------------------------------------------------------------------------------------------


def main(args: ProbeArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    with refuse_bad_input():
        values = {key: value for key, value in asdict(args).items() if key not in NOT_OF_THE_RUN}
        folder = check_output_dir(args.output_dir, values, args.resume)
        models = load_models(args)
        items = load_data(args, models)
    state = start_processes()
    args.use_threads()
    if state.is_main_process:
        begin_run(folder, values)
    # What an earlier, stopped run has written is not computed again.
    share_out(list(models), lambda name: probe(name, models[name], items, args, folder, state.device))
    scores = {pair: CoreferenceScores.load(scores_file(folder, *pair)) for pair in items}
    summary = {
        "rows": [row for pair, found in scores.items() for row in figures(*pair, found)],
        "models": list(models),
        "data": list(args.named_data()),
        **{key: {data: getattr(found, key) for (_, data), found in scores.items()} for key in COMPETING},
        "num_processes": state.num_processes,
        **provenance(args.seed, device_name(state)),
    }
    if state.is_main_process:
        publish(summary, scores, folder)
        write_json(folder / SUMMARY, summary)
        print_report(summary, folder)
    return summary


def scores_file(folder: Path, model: str, data: str) -> Path:
    return folder / "scores" / model / f"{data}.json"


def probe(name: str, source: Model, items: dict, args: ProbeArguments, folder: Path, device: torch.device) -> None:
    """Scores of one model on all data that have none yet."""
    missing = {
        data: kind for data, (kind, _) in args.named_data().items() if not scores_file(folder, name, data).is_file()
    }
    if not missing:
        return
    make, tokenizer = source
    with refuse_bad_input():
        model = make().to(device)
        for data, kind in missing.items():
            settings = {"batch_size": args.batch_size, "progress": not args.disable_tqdm, **args.competing(kind)}
            scores = coreference_accuracy(model, tokenizer, items[name, data], **settings)
            scores.save(scores_file(folder, name, data))


def figures(model: str, data: str, scores: CoreferenceScores) -> list[dict]:
    """A row for each group of items."""
    rows = []
    groups = list(scores.counts)
    # A single group is the same as all.
    for group in groups if len(groups) > 2 else groups[:1]:
        site, layer, head, accuracy = scores.best(group)
        rows.append(
            {
                "model": model,
                "data": data,
                "group": group,
                "items": scores.counts[group],
                "best": accuracy,
                "site": site,
                "layer": layer,
                "head": head,
                "mean": scores.mean(group),
                "skipped": sum(scores.skipped.values()),
                **{name.replace(" ", "_"): scores.baselines[name][group] for name in BASELINES},
            }
        )
    return rows


def table(summary: dict) -> tuple[list[str], list[list]]:
    """Header and rows as in table 8 of the paper: best heads; baselines are those of the first model's items."""
    rows = summary["rows"]
    columns = list(dict.fromkeys((row["data"], row["group"]) for row in rows))

    def line(name: str, model: str, key: str) -> list:
        values = {(row["data"], row["group"]): row[key] for row in rows if row["model"] == model}
        return [name, *map(values.get, columns)]

    baselines = [line(name, summary["models"][0], name.replace(" ", "_")) for name in BASELINES]
    models = [line(name, name, "best") for name in summary["models"]]
    return ["best head", *(f"{data} {group}" for data, group in columns)], [*baselines, *models]


def publish(summary: dict, scores: dict[tuple[str, str], CoreferenceScores], folder: Path) -> None:
    header, lines = table(summary)
    write_csv(folder / "table.csv", [dict(zip(header, line)) for line in lines])
    maps: dict[str, dict] = {}
    for (model, data), found in scores.items():
        for accuracies in found.accuracy["all"].values():
            maps.setdefault(model, {})[data] = accuracies
    plot_head_maps(maps, "fraction of antecedents found", folder / "heads.png")


def print_report(summary: dict, folder: Path) -> None:
    print("\n" + format_table(*table(summary)))
    for row in summary["rows"]:
        if row["group"] == "all":
            print(
                f"{row['model']}, {row['data']}: layer {row['layer']}, head {row['head']} of the {row['site']} is "
                f"right in {row['best']:.1%} of {row['items']:,} items; the mean of all heads is {row['mean']:.1%}."
            )
    print(f"Everything is in {folder}: {SUMMARY}, table.csv, heads.png, scores/.")


def cli() -> None:
    """Runs the recipe with the words of the command line."""
    run_recipe(main, ProbeArguments)


if __name__ == "__main__":
    cli()
