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
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import (
    AutoModel,
    BertConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .. import CoreferenceScores, coreference_accuracy
from .._refusals import refuse_bad_input
from .._tables import format_table
from ..analysis.plots.base import plot_head_maps
from ..data import (
    CoreferenceItem,
    add_distractors,
    embedded_coreference,
    load_coreference,
    single_token_items,
    train_byte_level_bpe,
)
from .arguments.probe_coreference import ProbeArguments
from .checkpoints import load_checkpoint, load_config, load_tokenizer
from .run import SUMMARY, Run, run_recipe, share_out, write_csv


COMPETING = ("special_tokens", "mentions_only")
BASELINES = ("previous word", "first word", "nearest mention", "chance")
Model = tuple[Callable[[], PreTrainedModel], PreTrainedTokenizerBase]


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
    run = Run(args)
    with run.preparing():
        models = load_models(args)
        items = load_data(args, models)
    # What an earlier, stopped run has written is not computed again.
    share_out(list(models), lambda name: probe(name, models[name], items, args, run.folder, run.state.device))
    scores = {pair: CoreferenceScores.load(scores_file(run.folder, *pair)) for pair in items}
    found = {
        "rows": [row for pair, of_pair in scores.items() for row in figures(*pair, of_pair)],
        "models": list(models),
        "data": list(args.named_data()),
        **{key: {data: getattr(of_pair, key) for (_, data), of_pair in scores.items()} for key in COMPETING},
    }
    return run.finish(
        found,
        lambda summary: publish(summary, scores, run.folder),
        lambda summary: print_report(summary, run.folder),
    )


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


if __name__ == "__main__":
    run_recipe(main)
