# Licensed under the Apache License, Version 2.0.
"""Watch a bag-of-words attention classifier learn: scores, embedding norms, and the law that ties them together.

    accelerate launch recipes/score_norm.py                                    # the synthetic task, figures 1 and 2
    accelerate launch recipes/score_norm.py --experiment ablation              # figure 3
    accelerate launch recipes/score_norm.py --experiment sst2 --sst2 SST-2     # figures 4 to 7, from a folder of files
    accelerate launch recipes/score_norm.py --experiment all --sst2 SST-2      # everything for which there are files

The experiments of Lu et al. (2021): `synthetic` (section 5.1), `ablation` (keys or embeddings frozen), `sst2` and
`sst5` (section 5.2), `cnn` (pairs of words, appendix A), `query` (a trained query, appendix B). Models are FC, TC and
TL, with a fixed, a linear and a two-layer classifier; all runs of an experiment are trained at once, on the same
sentences, by full-batch gradient descent; with `sst2` and `sst5`, all runs of a model. Runs differ in their initial
weights.

Files of `sst2` and `sst5` are `train`, `dev` and `test`, each a table that `load_classification` reads, such as TSV:
words with spaces between them, and a label from 0. Training stops after `--patience` epochs in which the loss on `dev`
had no new minimum: with the paper's learning rate, TC after some 14,000, FC after more than ten times as many, and
`--learning_rate 2` gets there in a twentieth of the time. Words that training has not seen share one embedding. The
paper's published code removes punctuation, as `--punctuation false` does. The paper's lengths and sizes are the
defaults; `--runs`, `--epochs` and `--hidden_size` change them for all experiments of a call.

Writes to `--output_dir`: `summary.json`, `config.yaml`, a JSON file of figures for each finished experiment, pictures
(PNG and SVG), `sst2_words.csv` (the words with the largest scores), `sst2_vocabulary.json`, and `models/` with the
first run of each model of `synthetic`, `sst2` and `sst5`, and its card.

Keys of `summary.json`, each with the experiment in front, such as `synthetic_accuracy`; by model, some as an interval
over runs (`mean`, and 95 % bounds `low` and `high`, empty for one run):
    accuracy            share of correct test sentences, an interval
    loss                training loss, the largest of the runs
    epochs              updates that were made, by run
    topic_score, topic_norm, other_score, other_norm     means over topic words (or pairs) and others, intervals; with
                        `cnn`, of scores and vectors less what they were at first
    max_other_score     largest |score| of another word
    max_curve_error     largest |norm − theory| along the curves of all topic words and runs (corollary 1); with
                        `query`, over the scores that all variances reach; with `sst2` and `sst5`, the `median` over
                        the top words, and the share of these that is `below_0.1`
    max_residual        largest residual of theorem 1 from beginning to end, over topic words and runs
    seconds             of training
Of `ablation`:
    epoch_of_loss       first recorded epoch with a loss of at most 0.1, by model; empty if there is none
    enhancement         `word`, and at the `epoch` at which TC has that loss, score and norm by model
    diminution          `word`, and at the `epoch` of its lowest score in TC, score and norm by model
Of `sst2` and `sst5`:
    top_words           words with the largest scores, by model, in their order
    attended            mean purity and occurrences of the words attended to, first and last, by model (`sst2`)
And num_processes, seed, device, command and versions.
"""

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import BowAttentionConfig, BowAttentionForSequenceClassification
from .._files import read_json
from .._tables import format_table
from ..analysis.score_norm import (
    ScoreNormHistory,
    attended_profile,
    attended_words,
    curve_error,
    harmonic_others,
    run_interval,
    score_norm_curve,
    score_norm_terms,
    topic_purity,
)
from ..data import (
    align_labels,
    load_classification,
    pair_sentences,
    topic_pairs,
    topic_sentences,
    topic_words,
)
from ..data.word_counts import WordCounts
from ..hub.card import Metric, write_model_card
from ..training import BowAttentionStack, DescentResult, LabelledSentences, stacked_gradient_descent
from .arguments.score_norm import MODELS, TREEBANKS, ScoreNormArguments
from .run import SUMMARY, Run, device_name, provenance, run_recipe, save_made, share_out, write_csv, write_json
from .score_norm_plots import (
    Curves,
    Series,
    plot_attended,
    plot_distributions,
    plot_score_norm_curves,
    plot_series,
)


SPLITS = ("train", "dev", "test")
VOCABULARY = "vocabulary.json"
UNKNOWN = 1  # 0 is padding
OTHERS = 20  # words of a synthetic sentence that tell nothing
KEY_SIZE = 15
VARIANCES = (0.1, 0.5, 1.0, 2.0)  # of a trained query
FIGURE_3 = 3000  # epochs that it shows
LEARNT = 0.1  # loss
PAIR = ("powerful", "best")  # figure 5
WORDS = ("worst", "mess", "stupid", "suffers", "solid")  # figure 6


# ---------------------------------------------------------------------------------------------------------------------
# Models and their training
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """Stacked models after training; runs of the first model come first, then those of the second."""

    names: list[str]
    stack: BowAttentionStack
    result: DescentResult
    history: ScoreNormHistory
    losses: torch.Tensor
    seconds: float

    def by_model(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Values whose first dimension is all runs, cut into those of each model."""
        return dict(zip(self.names, values.cpu().chunk(len(self.names))))

    def curves(self, unit: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Scores and norms of a recorded unit, of shape `(epochs, runs)`, by model."""
        halves = (self.history.scores[..., unit], self.history.norms[..., unit])
        return dict(zip(self.names, zip(*(half.chunk(len(self.names), 1) for half in halves))))

    def figures(self, test: LabelledSentences) -> dict[str, Any]:
        """What all experiments report."""
        return {
            "accuracy": self.intervals(self.stack.accuracies(test)),
            "loss": {name: losses.max().item() for name, losses in self.by_model(self.result.losses).items()},
            "epochs": {name: epochs.tolist() for name, epochs in self.by_model(self.result.epochs).items()},
            "seconds": self.seconds,
        }

    def intervals(self, values: torch.Tensor) -> dict[str, dict[str, float | None]]:
        """Mean and bounds over the runs of each model, of shape `(runs,)`."""
        found = {}
        for name, of_runs in self.by_model(values).items():
            bounds = {key: bound.item() for key, bound in run_interval(of_runs, limits=(0, 1))._asdict().items()}
            found[name] = {key: None if bound != bound else bound for key, bound in bounds.items()}
        return found


def build(settings: dict[str, dict], runs: int, seed: int, device: torch.device) -> BowAttentionStack:
    """Some models, each with as many initial weights, in one stack."""
    models = []
    for own in settings.values():
        for run in range(runs):
            torch.manual_seed(seed + run)
            models.append(BowAttentionForSequenceClassification(BowAttentionConfig(**own)).to(device))
    return BowAttentionStack(models)


def train(
    name: str,
    settings: dict[str, dict],
    data: LabelledSentences,
    args: ScoreNormArguments,
    device: torch.device,
    units: Sequence[int] | None = None,
    centred: bool = False,
    dev: LabelledSentences | None = None,
    extra_records: Sequence[int] = (),
) -> Trained:
    """Trains all runs of an experiment, and records scores, norms and losses."""
    sizes = args.sizes(name)
    stack = build(settings, sizes.runs, args.seed, device)
    history, losses = ScoreNormHistory(units, centred), []

    def record(epoch: int, values: torch.Tensor) -> None:
        history.add(epoch, *stack.score_norms(data))
        losses.append(values.cpu())

    started = time.perf_counter()
    result = stacked_gradient_descent(
        lambda: stack.losses(data),
        stack.parameters,
        stack.learning_rates(args.learning_rate),
        sizes.epochs,
        validation=None if dev is None else lambda: stack.losses(dev),
        patience=None if dev is None else args.patience,
        record=record,
        record_at={*moments(sizes.epochs, args.records), *extra_records},
        progress=None if args.disable_tqdm else name,
    )
    seconds = time.perf_counter() - started
    return Trained(list(settings), stack, result, history, torch.stack(losses), seconds)


def moments(epochs: int, records: int) -> set[int]:
    """When to record: evenly, and as often again ever more rarely, since words may start to grow early or late."""
    early = torch.logspace(0, math.log10(epochs), records).round().int().tolist()
    return {*range(0, epochs + 1, max(1, epochs // records)), *early}


def settings_of(names: Sequence[str], **common: Any) -> dict[str, dict]:
    return {name: {**MODELS[name], **common} for name in names}


def save_models(
    trained: Trained,
    folder: Path,
    args: ScoreNormArguments,
    test: LabelledSentences,
    text: str,
    vocabulary: list[str] | None = None,
) -> None:
    """The first run of each model, with its card, and with the words that it reads if these are real ones."""
    accuracies = trained.by_model(trained.stack.accuracies(test))
    losses, epochs = (trained.by_model(values) for values in (trained.result.losses, trained.result.epochs))
    models = trained.stack.unstack()
    runs = len(models) // len(trained.names)
    for name, model in zip(trained.names, models[::runs]):
        save_made(model, folder / name)
        if vocabulary is not None:
            write_json(folder / name / VOCABULARY, vocabulary)
        accuracy, updates = accuracies[name][0].item(), int(epochs[name][0])
        write_model_card(
            folder / name,
            name=f"attention over bags of words, {name}",
            description=f"Attention over bags of words with a {model.config.classifier} classifier ({name} of Lu et "
            f"al. 2021), trained for {updates:,} epochs of gradient descent. It has no tokenizer: `input_ids` are "
            f"{'numbers of words' if vocabulary is None else f'places of words in {VOCABULARY}'}.",
            config=model.config,
            task="text-classification",
            figures={"accuracy": accuracy, "loss": losses[name][0].item(), "epochs": updates},
            metric=Metric("accuracy", "accuracy", accuracy, "test"),
            dataset=text,
            provenance=provenance(args.seed, device_name(model)),
            methods=["score_norm"],
            license=args.license,
        )


# ---------------------------------------------------------------------------------------------------------------------
# Sentences with topic words
# ---------------------------------------------------------------------------------------------------------------------


def topic_data(
    args: ScoreNormArguments, device: torch.device
) -> tuple[LabelledSentences, LabelledSentences, list[int], dict]:
    """Training and test sentences, topic words, and sizes of a model for them."""
    telling = [word for words in topic_words() for word in words]
    train_set, test_set = topic_sentences(others=OTHERS, seed=args.seed)
    vocab_size = 1 + len(telling) + 5000
    sets = [LabelledSentences(one["input_ids"], one["label"], vocab_size).to(device) for one in (train_set, test_set)]
    return *sets, telling, {"vocab_size": vocab_size, "num_labels": len(topic_words())}


def topic_figures(trained: Trained, data: LabelledSentences, telling: list[int]) -> tuple[dict, dict]:
    """Figures about topic words and the other ones that occur, and what Figures 1 and 8 show of them."""
    scores, norms = (values[-1] for values in (trained.history.scores, trained.history.norms))
    occurs = data.counts.occurrences.cpu() > 0
    is_topic = torch.zeros_like(occurs)
    is_topic[telling] = True
    panels, figures = {}, {}
    for kind, chosen in (("other", occurs & ~is_topic), ("topic", occurs & is_topic)):
        for what, values in (("score", scores), ("norm", norms)):
            figures[f"{kind}_{what}"] = trained.intervals(values[:, chosen].mean(1))
            panels[f"{what} of {kind} words"] = trained.by_model(values[:, chosen])
    others = trained.by_model(scores[:, occurs & ~is_topic].abs())
    figures["max_other_score"] = {name: values.max().item() for name, values in others.items()}
    return figures, panels


def synthetic(args: ScoreNormArguments, folder: Path, device: torch.device) -> dict[str, Any]:
    """Figures 1 and 2: topic words grow, other words do not, and norms follow scores, whatever the classifier."""
    data, test, telling, sizes = topic_data(args, device)
    settings = settings_of(("FC", "TC", "TL"), **sizes, hidden_size=args.sizes("synthetic").hidden_size)
    before = build(settings, args.sizes("synthetic").runs, args.seed, device).score_norms(data)
    trained = train("synthetic", settings, data, args, device)
    figures, panels = topic_figures(trained, data, telling)
    plot_distributions(panels, folder / "synthetic_distributions")
    word = telling[args.seed % len(telling)]
    plot_score_norm_curves(
        [[Curves(f"{name}, word {word}", *curve, OTHERS) for name, curve in trained.curves(word).items()]],
        folder / "synthetic_curves",
    )
    errors = curve_error(trained.history.scores[..., telling], trained.history.norms[..., telling], OTHERS)
    terms = [score_norm_terms(*values, data.counts, telling) for values in (before, trained.stack.score_norms(data))]
    residuals = terms[1].residual(terms[0]).abs()
    text = "sentences with topic words (Lu et al. 2021, section 5.1)"
    save_models(trained, folder / "models" / "synthetic", args, test, text)
    return {
        **trained.figures(test),
        **figures,
        "max_curve_error": {name: values.max().item() for name, values in trained.by_model(errors).items()},
        "max_residual": {name: values.max().item() for name, values in trained.by_model(residuals).items()},
    }


def ablation(args: ScoreNormArguments, folder: Path, device: torch.device) -> dict[str, Any]:
    """Figure 3: scores and embeddings let each other grow, or at first keep each other from it."""
    data, test, telling, sizes = topic_data(args, device)
    own = args.sizes("ablation")
    settings = settings_of(("TC", "TC-KF", "TC-EF"), **sizes, hidden_size=own.hidden_size, embedding_std=0.1**0.5)
    shown = min(FIGURE_3, own.epochs)
    dense = range(0, shown + 1, max(1, shown // 300))
    trained = train("ablation", settings, data, args, device, units=telling, extra_records=dense)
    epochs = trained.history.epochs
    # Of the first run; by model, of shape (epochs, words).
    scores, norms = (
        dict(zip(trained.names, values[:, :: own.runs].unbind(1)))
        for values in (trained.history.scores, trained.history.norms)
    )
    losses = {name: values[0] for name, values in trained.by_model(trained.losses.T).items()}
    learnt = {
        name: next((e for e, loss in zip(epochs, line.tolist()) if loss <= LEARNT), None)
        for name, line in losses.items()
    }
    # One word whose score grows at once, and one whose score first falls: its embedding starts on the wrong side.
    until = epochs.index(learnt["TC"]) if learnt["TC"] is not None else len(epochs) - 1
    helped, hindered = scores["TC"][until].argmax().item(), scores["TC"][: until + 1].amin(0).argmin().item()
    lowest = scores["TC"][: until + 1, hindered].argmin().item()
    # A fall is small beside the growth that follows: it needs a picture of its own.
    growth, fall = (
        sum(epoch <= last for epoch in epochs) for last in (shown, min(shown, 3 * epochs[lowest] or shown))
    )
    panels = [
        ("enhancement: score", "score", scores, helped, ("TC", "TC-EF"), growth),
        ("enhancement: norm", "norm", norms, helped, ("TC", "TC-KF"), growth),
        ("diminution: score", "score", scores, hindered, ("TC", "TC-EF"), fall),
        ("diminution: norm", "norm", norms, hindered, ("TC", "TC-KF"), fall),
    ]
    series = [
        Series(title, name, epochs[:last], {model: values[model][:last, word] for model in models})
        for title, name, values, word, models, last in panels
    ]
    losses = {model: line[:growth] for model, line in losses.items()}
    series.insert(2, Series("loss", "training loss", epochs[:growth], losses, log=True))
    plot_series([series], folder / "ablation")

    def at(moment: int, word: int) -> dict[str, Any]:
        values = {"score": scores, "norm": norms}
        found = {key: {name: of[name][moment, word].item() for name in trained.names} for key, of in values.items()}
        return {"word": telling[word], "epoch": epochs[moment], **found}

    return {
        **trained.figures(test),
        "epoch_of_loss": learnt,
        "enhancement": at(until, helped),
        "diminution": at(lowest, hindered),
    }


def query(args: ScoreNormArguments, folder: Path, device: torch.device) -> dict[str, Any]:
    """Figure 10: the larger a trained query is at first, the closer norms come to the theory for a frozen one."""
    data, test, telling, sizes = topic_data(args, device)
    common = {**sizes, "hidden_size": args.sizes("query").hidden_size, "key_size": KEY_SIZE, "freeze_query": False}
    settings = {
        # Vectors ‖q‖ν have the paper's variance of 1e-6, whatever the query.
        f"{name} σ²={variance:g}": {
            **MODELS[name],
            **common,
            "query_std": variance**0.5,
            "embedding_std": 1e-3 / (variance * KEY_SIZE) ** 0.5,
        }
        for name in ("FC", "TC", "TL")
        for variance in VARIANCES
    }
    trained = train("query", settings, data, args, device, units=telling)
    word = args.seed % len(telling)
    curves = [Curves(name, *curve, OTHERS) for name, curve in trained.curves(word).items()]
    columns = len(VARIANCES)
    plot_score_norm_curves([curves[i : i + columns] for i in range(0, len(curves), columns)], folder / "query_curves")
    scores, norms = (
        values.chunk(len(curves) // columns, 1) for values in (trained.history.scores, trained.history.norms)
    )
    # Of each classifier, as far as its curves all go.
    errors = [curve_error(*pair, OTHERS, up_to=pair[0].amax(0).min().item()) for pair in zip(scores, norms)]
    return {
        **trained.figures(test),
        "max_curve_error": {name: values.max().item() for name, values in trained.by_model(torch.cat(errors)).items()},
    }


def cnn(args: ScoreNormArguments, folder: Path, device: torch.device) -> dict[str, Any]:
    """Figures 8 and 9: the same where attention sees pairs of words through convolutions."""
    pairs = topic_pairs(seed=args.seed)
    sets = pair_sentences(pairs, seed=args.seed)
    words = 200
    data, test = (
        LabelledSentences(one["input_ids"], one["label"], words + 1, convolution=True).to(device) for one in sets
    )
    places = {pair: unit for unit, pair in enumerate(map(tuple, data.pairs.tolist()))}
    telling = [places[pair] for of_topic in pairs for pair in of_topic]
    settings = settings_of(
        ("TC",),
        vocab_size=words + 1,
        num_labels=len(pairs),
        convolution=True,
        hidden_size=args.sizes("cnn").hidden_size,
    )
    # Convolutions have biases, so that pairs do not start from zero.
    trained = train("cnn", settings, data, args, device, centred=True)
    figures, panels = topic_figures(trained, data, telling)
    panels = {title.replace("words", "pairs, centred"): values for title, values in panels.items()}
    plot_distributions(panels, folder / "cnn_distributions")
    unit = telling[args.seed % len(telling)]
    others = len(sets[0][0]["input_ids"]) - 2
    title = f"TC-CNN, pair {tuple(data.pairs[unit].tolist())}"
    plot_score_norm_curves([[Curves(title, *trained.curves(unit)["TC"], others)]], folder / "cnn_curves")
    return {**trained.figures(test), **figures}


# ---------------------------------------------------------------------------------------------------------------------
# Real sentences
# ---------------------------------------------------------------------------------------------------------------------


Split = tuple[list[list[int]], list[int]]  # sentences as words of a vocabulary, and their labels


def words_of(text: str, punctuation: bool) -> list[str]:
    """Words of a sentence; an unknown one if it has lost them all with its punctuation."""
    return (text if punctuation else re.sub(r"[^\w\s]", "", text)).split() or ["[UNK]"]


def load_splits(folder: str, punctuation: bool = True) -> tuple[list[str], dict[str, Split]]:
    """Vocabulary of the training set, and sentences with their labels by split."""
    loaded = {}
    for split in SPLITS:
        files = sorted(Path(folder).glob(f"{split}.*"))
        if not files:
            raise ValueError(f"{folder} holds no file {split}.tsv, .csv, .jsonl, .json or .parquet.")
        if len(files) > 1:
            raise ValueError(f"{folder} holds {' and '.join(file.name for file in files)}; leave one of them.")
        texts = load_classification(files[0])
        names = (loaded["train"] if loaded else texts).features["label"].names
        if unknown := set(texts.features["label"].names) - set(names):
            raise ValueError(f"{files[0]} has the label {min(unknown)!r}, which the train file lacks.")
        # Each file numbers those classes that it has.
        loaded[split] = align_labels(texts, names)
    sentences = {split: [words_of(text, punctuation) for text in one["text"]] for split, one in loaded.items()}
    known = {word for words in sentences["train"] for word in words} - {"[PAD]", "[UNK]"}
    vocabulary = ["[PAD]", "[UNK]", *sorted(known)]
    ids = {word: index for index, word in enumerate(vocabulary)}
    return vocabulary, {
        split: ([[ids.get(word, UNKNOWN) for word in words] for words in own], loaded[split]["label"][:])
        for split, own in sentences.items()
    }


def treebank(name: str, args: ScoreNormArguments, folder: Path, device: torch.device) -> dict[str, Any]:
    """Figure 4, and with two classes 5 to 7: words of a real text, where no word tells everything."""
    vocabulary, splits = load_splits(getattr(args, name), args.punctuation)
    train_set, dev, test = (LabelledSentences(*splits[split], len(vocabulary)).to(device) for split in SPLITS)
    num_labels = max(splits["train"][1]) + 1
    settings = settings_of(
        args.models, vocab_size=len(vocabulary), num_labels=num_labels, hidden_size=args.sizes(name).hidden_size
    )
    # Runs of a model stop at about the same time, but FC long after TC, and a stack costs the same until all stop.
    dense = moments(args.sizes(name).epochs, 3 * args.records)
    trained = [
        train(name, {model: own}, train_set, args, device, dev=dev, extra_records=dense)
        for model, own in settings.items()
    ]
    runs = {model: first_run(one) for model, one in zip(settings, trained)}
    counts = train_set.counts.to("cpu")
    purity = topic_purity(counts, train_set.labels.cpu()) if num_labels == 2 else None
    words = measure_words(runs, vocabulary, counts, purity, args.top_words)
    write_csv(folder / f"{name}_words.csv", [row for rows in words.values() for row in rows])
    write_json(folder / f"{name}_vocabulary.json", vocabulary)
    ids = {word: index for index, word in enumerate(vocabulary)}
    best = {model: [ids[row["word"]] for row in rows[:2]] for model, rows in words.items()}
    curves = [curve for model in runs for curve in word_curves(model, runs[model], counts, best[model], vocabulary)]
    plot_score_norm_curves([curves], folder / f"{name}_curves")
    figures = joined([one.figures(test) for one in trained])
    if purity is not None:
        figures["attended"] = draw_attended(runs, counts, purity, ids, folder, name)
        if all(word in ids for word in PAIR):
            draw_competition(runs, counts, [ids[word] for word in PAIR], vocabulary, folder, name)
    for one in trained:
        save_models(one, folder / "models" / name, args, test, Path(getattr(args, name)).resolve().name, vocabulary)
    return {
        **figures,
        "max_curve_error": {
            model: {
                "median": torch.tensor([row["curve_error"] for row in rows]).median().item(),
                "below_0.1": sum(row["curve_error"] < 0.1 for row in rows) / len(rows),
            }
            for model, rows in words.items()
        },
        "top_words": {model: [row["word"] for row in rows] for model, rows in words.items()},
    }


class Recorded(NamedTuple):
    """What a run has recorded until it stopped: scores and norms of shape `(epochs, words)`."""

    epochs: list[int]
    scores: torch.Tensor
    norms: torch.Tensor


def first_run(trained: Trained) -> Recorded:
    """The first run of a stack."""
    history, last = trained.history, int(trained.result.epochs[0])
    # A run that has stopped stays as it is: the next record shows how it ended.
    epochs = [epoch for epoch in history.epochs if epoch < last] + [last]
    return Recorded(epochs, *(values[: len(epochs), 0] for values in (history.scores, history.norms)))


def joined(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of several stacks, with those by model side by side, and seconds added up."""
    return {
        key: sum(one[key] for one in figures)
        if key == "seconds"
        else {model: value for one in figures for model, value in one[key].items()}
        for key in figures[0]
    }


def measure_words(
    runs: dict[str, Recorded],
    vocabulary: list[str],
    counts: WordCounts,
    purity: torch.Tensor | None,
    top_words: int,
) -> dict[str, list[dict[str, Any]]]:
    """The words with the largest scores of each model."""
    found, others = {}, harmonic_others(counts)
    for name, (_, scores, norms) in runs.items():
        # Words that training has not seen have no curve.
        ranked = scores[-1].masked_fill(others.isnan(), -torch.inf).argsort(descending=True)
        top = ranked[: min(top_words, int(others.isfinite().sum()))].tolist()
        errors = curve_error(scores[:, top], norms[:, top], others[top])
        theory = score_norm_curve(scores[-1, top], others[top])
        found[name] = [
            {
                "model": name,
                "word": vocabulary[word],
                "score": scores[-1, word].item(),
                "norm": norms[-1, word].item(),
                "norm_in_theory": theory[rank].item(),
                "curve_error": errors[rank].item(),
                "occurrences": int(counts.occurrences[word]),
                "purity": None if purity is None else purity[word].item(),
            }
            for rank, word in enumerate(top)
        ]
    return found


def word_curves(name: str, run: Recorded, counts: WordCounts, words: list[int], vocabulary: list[str]) -> list[Curves]:
    """Curves of some words of a model."""
    others = harmonic_others(counts)
    return [
        Curves(f"{name}: {vocabulary[word]}", run.scores[:, word, None], run.norms[:, word, None], others[word].item())
        for word in words
    ]


def draw_competition(
    runs: dict[str, Recorded], counts: WordCounts, pair: list[int], vocabulary: list[str], folder: Path, name: str
) -> None:
    """Figure 5: a frequent word of less purity is attended to first, and overtaken by a rarer and purer one."""
    together = [row for row in range(counts.num_sentences) if set(pair) <= set(_words(counts, row).tolist())]
    curves, series = [], []
    for model, run in runs.items():
        curves.append(word_curves(model, run, counts, pair, vocabulary))
        epochs, scores, norms = run
        kinds = {"score": scores[:, pair], "norm": norms[:, pair]}
        if together:
            entries = slice(*counts.sentence_starts[together[0] : together[0] + 2].tolist())
            weights = (scores[:, counts.words[entries]] + counts.counts[entries].log()).softmax(-1)
            places = [counts.words[entries].tolist().index(word) for word in pair]
            kinds["weight in a sentence with both"] = weights[:, places]
        series.append(
            [
                Series(f"{model}: {kind}", kind.split()[0], epochs, dict(zip(PAIR, values.T)))
                for kind, values in kinds.items()
            ]
        )
    plot_score_norm_curves(curves, folder / f"{name}_competition_curves")
    plot_series(series, folder / f"{name}_competition")


def _words(counts: WordCounts, sentence: int) -> torch.Tensor:
    return counts.words[counts.sentence_starts[sentence] : counts.sentence_starts[sentence + 1]]


def draw_attended(
    runs: dict[str, Recorded], counts: WordCounts, purity: torch.Tensor, ids: dict[str, int], folder: Path, name: str
) -> dict[str, Any]:
    """Figures 6 and 7: attention moves from frequent words to those that tell a class."""
    chosen = [word for word in WORDS if word in ids]
    by_word: dict[str, dict] = {}
    overall: dict[str, dict] = {}
    figures = {}
    for model, run in runs.items():
        attended = [attended_words(scores, counts) for scores in run.scores]
        for title in ("", *chosen):
            profiles = [attended_profile(words, counts, purity, ids.get(title)) for words in attended]
            target = by_word if title else overall
            target.setdefault(model, {})[title] = (run.epochs, *zip(*profiles))
        _, purities, occurrences = overall[model][""]
        figures[model] = {
            f"{key}_{moment}": values[place]
            for key, values in (("purity", purities), ("occurrences", occurrences))
            for moment, place in (("first", 0), ("last", -1))
        }
    if chosen:
        plot_attended(by_word, folder / f"{name}_attended_by_word")
    plot_attended({"": {model: line[""] for model, line in overall.items()}}, folder / f"{name}_attended")
    return figures


# ---------------------------------------------------------------------------------------------------------------------


def make(experiment: str, args: ScoreNormArguments, folder: Path, device: torch.device) -> dict[str, Any]:
    """Figures of one experiment."""
    if experiment in TREEBANKS:
        return treebank(experiment, args, folder, device)
    return {"synthetic": synthetic, "ablation": ablation, "cnn": cnn, "query": query}[experiment](args, folder, device)


def main(args: ScoreNormArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    run = Run(args)
    with run.preparing():
        for name in set(TREEBANKS) & set(args.experiments()):
            load_splits(getattr(args, name))

    def make_once(name: str) -> None:
        # What an earlier, stopped run has finished is not made again.
        if not (run.folder / f"{name}.json").is_file():
            write_json(run.folder / f"{name}.json", make(name, args, run.folder, run.state.device))

    share_out(args.experiments(), make_once)
    figures = {name: read_json(run.folder / f"{name}.json") for name in args.experiments()}
    return run.finish(
        {f"{name}_{key}": value for name, found in figures.items() for key, value in found.items()},
        lambda summary: None,  # each experiment has drawn its own pictures
        lambda summary: print_report(figures, run.folder),
    )


def print_report(figures: dict[str, dict], folder: Path) -> None:
    rows = []
    for name, found in figures.items():
        for model, accuracy in found["accuracy"].items():
            error = found.get("max_curve_error", {}).get(model)
            score = found.get("topic_score", {}).get(model, {}).get("mean")
            error = error["median"] if isinstance(error, dict) else error
            rows.append(
                [name, model, accuracy["mean"], found["loss"][model], max(found["epochs"][model]), score, error]
            )
    header = ["experiment", "model", "accuracy", "loss", "epochs", "score of topic words", "|norm − theory|"]
    print("\n" + format_table(header, rows))
    for name, found in figures.items():
        print(f"{name}: trained in {found['seconds']:.0f} s.")
    print(f"Everything is in {folder}: {SUMMARY}, pictures, models/.")


if __name__ == "__main__":
    run_recipe(main)
