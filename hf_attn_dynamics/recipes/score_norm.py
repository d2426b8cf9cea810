# Licensed under the Apache License, Version 2.0.
"""Train bag-of-words attention classifiers, and compare word scores and embedding norms with theory (Lu et al. 2021).

    accelerate launch recipes/score_norm.py                                    # the synthetic task, figures 1 and 2
    accelerate launch recipes/score_norm.py recipes/configs/score_norm.yaml    # the same, every key explained
    accelerate launch recipes/score_norm.py --experiment ablation              # figure 3
    accelerate launch recipes/score_norm.py --experiment sst2 --sst2 SST-2     # figures 4 to 7, from a folder of files
    accelerate launch recipes/score_norm.py --experiment all --sst2 SST-2      # all experiments with files

The experiments are `synthetic` (section 5.1), `ablation` (keys or embeddings frozen), `sst2` and `sst5` (section 5.2),
`cnn` (pairs of words, appendix A) and `query` (a trained query, appendix B). The classifiers FC, TC and TL are fixed,
linear and two-layer. Full-batch gradient descent trains all runs of an experiment at once on the same sentences; with
`sst2` and `sst5`, all runs of a classifier. Runs differ in their initial weights.

Files of `sst2` and `sst5` are `train`, `dev` and `test`, each a table that `load_classification` reads, such as TSV,
with words separated by spaces, and labels from 0. Training stops after `--patience` epochs without a new minimum of
the loss on `dev`. With the paper's learning rate, this takes TC some 14,000 epochs and FC more than ten times as many;
`--learning_rate 2` needs a twentieth. Words that the training split does not contain share one embedding. The paper's
published code removes punctuation, as `--punctuation false` does. Epochs and sizes are the paper's by default;
`--num_seeds`, `--epochs` and `--hidden_size` change them for all experiments of a run.

Writes to `--output_dir`: `summary.json`, `config.yaml`, a JSON file of results per finished experiment, pictures (PNG
and SVG), `sst2_words.csv` (the words with the largest scores), `sst2_vocabulary.json`, and `models/` with the first
run of each classifier of `synthetic`, `sst2` and `sst5`, and its card.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from .._files import read_json
from .._tables import format_table
from ..analysis.plots.score_norm import Curves, plot_score_norm_curves
from ..analysis.score_norm import curve_error, score_norm_terms
from ..data import pair_sentences, topic_pairs, topic_sentences, topic_words
from ..training import LabelledSentences
from .arguments.score_norm import CLASSIFIERS, TREEBANKS, ScoreNormArguments
from .pictures import draw
from .run import SUMMARY, Run, run_recipe, share_out, write_json
from .score_norm_plots import (
    CLASSIFIER_NAMES,
    Series,
    histograms,
    plot_histograms,
    plot_series,
)
from .score_norm_stacks import TrainedStack, build_stack, classifier_settings, save_first_runs, train_stack
from .score_norm_words import load_treebank, treebank
from .summaries.score_norm import CurveErrors, ExperimentResults, ScoreNormSummary, WordMoment


NUM_OTHERS = 20  # words of a synthetic sentence that are independent of its class
KEY_SIZE = 15
VARIANCES = (0.1, 0.5, 1.0, 2.0)  # of the components of a trained query
FIGURE_3_EPOCHS = 3000
LEARNT_LOSS = 0.1
DRAWN_SCORES = 1200  # in a panel, over all runs
SYNTHETIC = f"Synthetic sentences with topic words; {CLASSIFIER_NAMES}"


def topic_data(
    args: ScoreNormArguments, device: torch.device
) -> tuple[LabelledSentences, LabelledSentences, list[int], dict[str, int]]:
    """Training and test sentences, topic words, and sizes of classifiers for them."""
    topics = [word for words in topic_words() for word in words]
    vocab_size = 1 + len(topics) + 5000
    data, test = (
        LabelledSentences(one["input_ids"], one["label"], vocab_size).to(device)
        for one in topic_sentences(others=NUM_OTHERS, seed=args.seed)
    )
    return data, test, topics, {"vocab_size": vocab_size, "num_labels": len(topic_words())}


def topic_results(trained: TrainedStack, data: LabelledSentences, topics: list[int]) -> tuple[dict, dict]:
    """Results about topic words and the other words that occur, and the panels of figures 1 and 8."""
    scores, norms = (values[-1] for values in (trained.history.scores, trained.history.norms))
    occurs = data.counts.occurrences.cpu() > 0
    is_topic = torch.zeros_like(occurs)
    is_topic[topics] = True
    panels, results = {}, {}
    for kind, chosen in (("other", occurs & ~is_topic), ("topic", occurs & is_topic)):
        for quantity, values in (("score", scores), ("norm", norms)):
            results[f"{kind}_{quantity}"] = trained.intervals(values[:, chosen].mean(1))
            panels[f"{quantity} of {kind} words"] = trained.by_classifier(values[:, chosen])
    results["max_other_score"] = trained.largest(scores[:, occurs & ~is_topic].abs())
    return results, panels


def draw_histograms(panels: dict[str, dict[str, torch.Tensor]], path: Path, title: str) -> None:
    """Draws figures 1 and 8 from values of shape `(runs, words)`, by panel title and classifier."""
    runs = max(len(values) for models in panels.values() for values in models.values())
    draw(plot_histograms, path, histograms(panels), title, runs)


def thinned(curves: list[Curves]) -> list[Curves]:
    """Curves with fewer records, so that the file of a picture stays small."""
    records, runs = curves[0].scores.shape
    chosen = torch.linspace(0, records - 1, min(records, DRAWN_SCORES // runs)).round().long()
    return [curve._replace(scores=curve.scores[chosen], norms=curve.norms[chosen]) for curve in curves]


def synthetic(args: ScoreNormArguments, folder: Path, device: torch.device) -> ExperimentResults:
    """Figures 1 and 2: only topic words grow, and norms follow scores, for all classifiers."""
    data, test, topics, sizes = topic_data(args, device)
    own = args.sizes("synthetic")
    settings = classifier_settings(("FC", "TC", "TL"), **sizes, hidden_size=own.hidden_size)
    before = build_stack(settings, own.num_seeds, args.seed, device).score_norms(data)
    trained = train_stack("synthetic", settings, data, args, device)
    results, panels = topic_results(trained, data, topics)
    draw_histograms(panels, folder / "synthetic_distributions", SYNTHETIC)
    word = topics[args.seed % len(topics)]
    curves = [Curves(f"{name}, word {word}", *curve, NUM_OTHERS) for name, curve in trained.curves(word).items()]
    draw(plot_score_norm_curves, folder / "synthetic_curves", [thinned(curves)], SYNTHETIC)
    errors = curve_error(trained.history.scores[..., topics], trained.history.norms[..., topics], NUM_OTHERS)
    first, last = (
        score_norm_terms(*values, data.counts, topics) for values in (before, trained.stack.score_norms(data))
    )
    text = "sentences with topic words (Lu et al. 2021, section 5.1)"
    save_first_runs(trained, folder / "models" / "synthetic", args, test, text)
    return ExperimentResults(
        **trained.results(test),
        **results,
        max_curve_error=trained.largest(errors),
        max_residual=trained.largest(last.residual(first).abs()),
    )


def ablation(args: ScoreNormArguments, folder: Path, device: torch.device) -> ExperimentResults:
    """Figure 3: scores and embeddings enhance each other's growth, or diminish it at first."""
    data, test, topics, sizes = topic_data(args, device)
    own = args.sizes("ablation")
    settings = classifier_settings(
        ("TC", "TC-KF", "TC-EF"), **sizes, hidden_size=own.hidden_size, embedding_std=0.1**0.5
    )
    shown = min(FIGURE_3_EPOCHS, own.epochs)
    dense = range(0, shown + 1, max(1, shown // 300))
    trained = train_stack("ablation", settings, data, args, device, units=topics, extra_records=dense)
    epochs = trained.history.epochs
    # Scores and norms of the first run have the shape (epochs, words), by classifier.
    scores, norms = (
        dict(zip(trained.names, values[:, :: own.num_seeds].unbind(1)))
        for values in (trained.history.scores, trained.history.norms)
    )
    losses = {name: values[0] for name, values in trained.by_classifier(trained.losses.T).items()}
    learnt = {
        name: next((epoch for epoch, loss in zip(epochs, line.tolist()) if loss <= LEARNT_LOSS), None)
        for name, line in losses.items()
    }
    # One word whose score grows at once, and one whose score falls first, since its embedding has the wrong sign.
    until = epochs.index(learnt["TC"]) if learnt["TC"] is not None else len(epochs) - 1
    helped, hindered = scores["TC"][until].argmax().item(), scores["TC"][: until + 1].amin(0).argmin().item()
    lowest = scores["TC"][: until + 1, hindered].argmin().item()
    # The fall is small beside the growth after it, and has its own panels.
    growth, fall = (
        sum(epoch <= last for epoch in epochs) for last in (shown, min(shown, 3 * epochs[lowest] or shown))
    )

    def panel(name: str, quantity: str, word: int, last: int) -> Series:
        values, frozen = {"score": (scores, "TC-EF"), "norm": (norms, "TC-KF")}[quantity]
        lines = {classifier: values[classifier][:last, word] for classifier in ("TC", frozen)}
        return Series(f"{name}: {quantity}", quantity, epochs[:last], lines)

    def at(index: int, word: int) -> WordMoment:
        score, norm = ({name: of[name][index, word].item() for name in trained.names} for of in (scores, norms))
        return WordMoment(word=topics[word], epoch=epochs[index], score=score, norm=norm)

    loss_lines = {name: line[:growth] for name, line in losses.items()}
    rows = [
        [
            panel("enhancement", "score", helped, growth),
            panel("enhancement", "norm", helped, growth),
            Series("loss", "training loss", epochs[:growth], loss_lines, log=True),
        ],
        [panel("diminution", "score", hindered, fall), panel("diminution", "norm", hindered, fall)],
    ]
    title = "Synthetic sentences with topic words; TC: linear classifier, EF: frozen embeddings, KF: frozen keys"
    draw(plot_series, folder / "ablation", rows, title)
    return ExperimentResults(
        **trained.results(test),
        epoch_of_loss=learnt,
        enhancement=at(until, helped),
        diminution=at(lowest, hindered),
    )


def query(args: ScoreNormArguments, folder: Path, device: torch.device) -> ExperimentResults:
    """Figure 10: the larger a trained query is at first, the closer norms come to the theory for a frozen query."""
    data, test, topics, sizes = topic_data(args, device)
    common = {**sizes, "hidden_size": args.sizes("query").hidden_size, "key_size": KEY_SIZE, "freeze_query": False}
    settings = {
        # Vectors ‖q‖ν have the paper's variance of 1e-6 for all queries.
        f"{name} σ²={variance:g}": {
            **CLASSIFIERS[name],
            **common,
            "query_std": variance**0.5,
            "embedding_std": 1e-3 / (variance * KEY_SIZE) ** 0.5,
        }
        for name in ("FC", "TC", "TL")
        for variance in VARIANCES
    }
    trained = train_stack("query", settings, data, args, device, units=topics)
    word, columns = args.seed % len(topics), len(VARIANCES)
    curves = [Curves(name, *curve, NUM_OTHERS) for name, curve in trained.curves(word).items()]
    rows = [thinned(curves[i : i + columns]) for i in range(0, len(curves), columns)]
    draw(plot_score_norm_curves, folder / "query_curves", rows, f"{SYNTHETIC}, query of variance σ² trained")
    scores, norms = (
        values.chunk(len(curves) // columns, 1) for values in (trained.history.scores, trained.history.norms)
    )
    # Errors of each classifier, up to the score that all its curves reach.
    errors = [curve_error(*pair, NUM_OTHERS, up_to=pair[0].amax(0).min().item()) for pair in zip(scores, norms)]
    return ExperimentResults(**trained.results(test), max_curve_error=trained.largest(torch.cat(errors)))


def cnn(args: ScoreNormArguments, folder: Path, device: torch.device) -> ExperimentResults:
    """Figures 8 and 9: the same for attention to pairs of words, with convolutions."""
    pairs = topic_pairs(seed=args.seed)
    sets = pair_sentences(pairs, seed=args.seed)
    vocab_size = 201
    data, test = (
        LabelledSentences(one["input_ids"], one["label"], vocab_size, convolution=True).to(device) for one in sets
    )
    units = {pair: unit for unit, pair in enumerate(map(tuple, data.pairs.tolist()))}
    topics = [units[pair] for of_topic in pairs for pair in of_topic]
    settings = classifier_settings(
        ("TC",),
        vocab_size=vocab_size,
        num_labels=len(pairs),
        convolution=True,
        hidden_size=args.sizes("cnn").hidden_size,
    )
    # Convolutions have biases: scores and vectors of pairs do not start at zero.
    trained = train_stack("cnn", settings, data, args, device, centered=True)
    results, panels = topic_results(trained, data, topics)
    panels = {title.replace("words", "pairs, centered"): values for title, values in panels.items()}
    draw_histograms(
        panels, folder / "cnn_distributions", "Synthetic sentences with topic pairs; TC: linear classifier"
    )
    unit = topics[args.seed % len(topics)]
    others = len(sets[0][0]["input_ids"]) - 2
    title = f"TC-CNN, pair {tuple(data.pairs[unit].tolist())}"
    curves = thinned([Curves(title, *trained.curves(unit)["TC"], others)])
    draw(plot_score_norm_curves, folder / "cnn_curves", [curves], "Synthetic sentences with topic pairs")
    return ExperimentResults(**trained.results(test), **results)


SYNTHETIC_EXPERIMENTS: dict[str, Callable[[ScoreNormArguments, Path, torch.device], ExperimentResults]] = {
    "synthetic": synthetic,
    "ablation": ablation,
    "cnn": cnn,
    "query": query,
}


def run_experiment(name: str, args: ScoreNormArguments, folder: Path, device: torch.device) -> ExperimentResults:
    if name in TREEBANKS:
        return treebank(name, args, folder, device)
    return SYNTHETIC_EXPERIMENTS[name](args, folder, device)


def main(args: ScoreNormArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    run = Run(args)
    with run.preparing():
        for name in set(TREEBANKS) & set(args.experiments()):
            load_treebank(getattr(args, name))

    def make(name: str) -> None:
        # A stopped run may have finished this experiment.
        if not (run.folder / f"{name}.json").is_file():
            results = run_experiment(name, args, run.folder, run.state.device)
            write_json(run.folder / f"{name}.json", results.to_dict())

    share_out(args.experiments(), make)
    summary = ScoreNormSummary(
        experiments={
            name: ExperimentResults.from_dict(read_json(run.folder / f"{name}.json")) for name in args.experiments()
        }
    )
    # Each experiment draws its own pictures.
    return run.finish(summary, lambda: None, lambda: print_report(summary, run.folder))


def print_report(summary: ScoreNormSummary, folder: Path) -> None:
    rows = []
    for name, found in summary.experiments.items():
        for classifier, accuracy in found.accuracy.items():
            score = (found.topic_score or {}).get(classifier)
            error = (found.max_curve_error or {}).get(classifier)
            rows.append(
                [
                    name,
                    classifier,
                    accuracy.mean,
                    found.loss[classifier],
                    max(found.epochs[classifier]),
                    score and score.mean,
                    error.median if isinstance(error, CurveErrors) else error,
                ]
            )
    header = ["experiment", "classifier", "accuracy", "loss", "epochs", "score of topic words", "|norm − theory|"]
    print("\n" + format_table(header, rows))
    for name, found in summary.experiments.items():
        print(f"{name}: trained in {found.seconds:.0f} s.")
    print(f"Everything is in {folder}: {SUMMARY}, pictures, models/.")


if __name__ == "__main__":
    run_recipe(main, summary=ScoreNormSummary)
