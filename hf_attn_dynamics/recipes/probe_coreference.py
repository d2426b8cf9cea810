# Licensed under the Apache License, Version 2.0.
"""Measure which attention heads find what a pronoun, name or noun phrase refers back to.

    accelerate launch recipes/probe_coreference.py                             # a demonstration on embedded sentences
    accelerate launch recipes/probe_coreference.py --model guided=runs/guided/model bert=bert-base-uncased \\
        --data open_sesame:refl.0.gz winobias:wino/data conll2012:conll-2012/dev --random_seeds 0 1 2

The probe of Deshpande & Narasimhan (2020, section 5.6) after Clark et al. (2019): a head is right where it attends
most from a mention to an antecedent; the results are those of the best head of each model. `AutoModel` must be able to
load a model, and `locate_heads` must know its architecture. The demonstration probes a tiny model with random weights,
which tells nothing about coreference.

Kinds of data: `open_sesame` (Lin et al. 2019; a file such as `refl.0.gz`), with a clause about others before each
sentence, and without the sentences that have a word of several tokens; `winobias` (a folder or a file); `winogender`
(`templates.tsv`, or its folder); `conll2012`, for which only the heads of mentions compete, as in Clark et al., while
otherwise all words and special tokens do. Tokenizers differ in the sentences that they keep: compare `items`.

Writes to `--output_dir`: `summary.json`, `table.csv` (a row per model and baseline, as table 8 of the paper),
`heads.png` and `.svg` (accuracy of each head), `config.yaml` (the values of the run) and `scores/MODEL/DATA.json` (all
heads; `CoreferenceScores.load` reads it).
"""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import (
    AutoModel,
    BertConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .. import CoreferenceScores, coreference_accuracy
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
from .pictures import draw
from .run import SUMMARY, Run, run_recipe, share_out, write_csv
from .summaries.probe_coreference import BASELINES, CoreferenceRow, CoreferenceSummary


# A function that loads or makes a model, and the tokenizer of the model.
ModelSource = tuple[Callable[[], PreTrainedModel], PreTrainedTokenizerBase]


def model_sources(args: ProbeArguments) -> dict[str, ModelSource]:
    """Sources of the models by name; weights are loaded when they are needed."""
    models: dict[str, ModelSource] = {}
    for name, checkpoint in args.named_models().items():
        if checkpoint is None:
            tokenizer, config = tiny_bert()
            models[name] = partial(random_model, config, args.seed), tokenizer
        else:
            config, tokenizer = load_config("model", checkpoint), load_tokenizer("model", checkpoint)
            models[name] = partial(load_checkpoint, "model", checkpoint, config), tokenizer
        for seed in args.random_seeds or ():
            models[f"{name}-random{seed}"] = partial(random_model, config, seed), tokenizer
    return models


def random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModel.from_config(config)


def tiny_bert() -> tuple[PreTrainedTokenizerBase, BertConfig]:
    tokenizer = train_byte_level_bpe([item.text for item in embedded_coreference()], vocab_size=500, kind="bert")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return tokenizer, BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes)


def load_items(args: ProbeArguments, models: dict[str, ModelSource]) -> dict[tuple[str, str], list[CoreferenceItem]]:
    """Items by model and dataset; those of `open_sesame` depend on the tokenizer."""
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
                    raise ValueError(f"data {path!r}: every sentence has a word of several tokens of {model}.")
                chosen[id(tokenizer)] = sample_items(kept, args)
            found[model, name] = chosen[id(tokenizer)]
    return found


def sample_items(items: list[CoreferenceItem], args: ProbeArguments) -> list[CoreferenceItem]:
    """`max_examples` random items in their order."""
    if args.max_examples is None or args.max_examples >= len(items):
        return items
    indices = random.Random(args.seed).sample(range(len(items)), args.max_examples)
    return [items[index] for index in sorted(indices)]


def main(args: ProbeArguments) -> dict:
    """Run the recipe; returns the content of `summary.json`."""
    run = Run(args)
    with run.preparing():
        models = model_sources(args)
        items = load_items(args, models)
    # Scores of an earlier, interrupted run are not computed again.
    share_out(list(models), lambda name: probe_model(name, models[name], items, args, run.folder, run.state.device))
    scores = {pair: CoreferenceScores.load(scores_file(run.folder, *pair)) for pair in items}
    summary = CoreferenceSummary(
        rows=[row for pair, of_pair in scores.items() for row in rows_of_scores(*pair, of_pair)],
        models=list(models),
        data=list(args.named_data()),
        special_tokens={data: of_pair.special_tokens for (_, data), of_pair in scores.items()},
        mentions_only={data: of_pair.mentions_only for (_, data), of_pair in scores.items()},
    )
    return run.finish(summary, lambda: publish(summary, scores, run.folder), lambda: print_report(summary, run.folder))


def scores_file(folder: Path, model: str, data: str) -> Path:
    return folder / "scores" / model / f"{data}.json"


def probe_model(
    name: str, source: ModelSource, items: dict, args: ProbeArguments, folder: Path, device: torch.device
) -> None:
    """Computes and saves the scores of one model on all data, unless the folder has them."""
    missing = {
        data: kind for data, (kind, _) in args.named_data().items() if not scores_file(folder, name, data).is_file()
    }
    if not missing:
        return
    make, tokenizer = source
    model = make().to(device)
    for data, kind in missing.items():
        settings = {"batch_size": args.batch_size, "progress": not args.disable_tqdm, **args.competing(kind)}
        scores = coreference_accuracy(model, tokenizer, items[name, data], **settings)
        scores.save(scores_file(folder, name, data))


def rows_of_scores(model: str, data: str, scores: CoreferenceScores) -> list[CoreferenceRow]:
    """A row per group of items; a single group is the same as all items."""
    groups = list(scores.counts)
    rows = []
    for group in groups if len(groups) > 2 else groups[:1]:
        site, layer, head, accuracy = scores.best(group)
        rows.append(
            CoreferenceRow(
                model=model,
                data=data,
                group=group,
                items=scores.counts[group],
                best=accuracy,
                site=site,
                layer=layer,
                head=head,
                mean=scores.mean(group),
                skipped=sum(scores.skipped.values()),
                baselines={name: scores.baselines[name.replace("_", " ")][group] for name in BASELINES},
            )
        )
    return rows


def coreference_table(summary: CoreferenceSummary) -> tuple[list[str], list[list]]:
    """Header and lines as in table 8 of the paper: baselines on the items of the first model, then best heads."""
    columns = list(dict.fromkeys((row.data, row.group) for row in summary.rows))

    def line(name: str, model: str, value: Callable[[CoreferenceRow], float]) -> list:
        values = {(row.data, row.group): value(row) for row in summary.rows if row.model == model}
        return [name, *map(values.get, columns)]

    baselines = [
        line(name.replace("_", " "), summary.models[0], lambda row, name=name: row.baselines[name])
        for name in BASELINES
    ]
    models = [line(name, name, lambda row: row.best) for name in summary.models]
    return ["best head", *(f"{data} {group}" for data, group in columns)], [*baselines, *models]


def publish(summary: CoreferenceSummary, scores: dict[tuple[str, str], CoreferenceScores], folder: Path) -> None:
    """Writes the table and the picture."""
    header, lines = coreference_table(summary)
    write_csv(folder / "table.csv", [dict(zip(header, line)) for line in lines])
    maps: dict[str, dict] = {}
    for (model, data), found in scores.items():
        for accuracies in found.accuracy["all"].values():
            maps.setdefault(model, {})[data] = accuracies
    title = ", ".join(summary.data)
    draw(plot_head_maps, folder / "heads.png", maps, "fraction of antecedents found", title=title)


def print_report(summary: CoreferenceSummary, folder: Path) -> None:
    print("\n" + format_table(*coreference_table(summary)))
    for row in summary.rows:
        if row.group == "all":
            print(
                f"{row.model}, {row.data}: layer {row.layer}, head {row.head} of the {row.site} is right in "
                f"{row.best:.1%} of {row.items:,} items; the mean of all heads is {row.mean:.1%}."
            )
    print(f"Everything is in {folder}: {SUMMARY}, table.csv, heads.png, scores/.")


if __name__ == "__main__":
    run_recipe(main, summary=CoreferenceSummary)
