# Licensed under the Apache License, Version 2.0.
"""The experiments of `score_norm.py` on real sentences: words with large scores, and the words that get attention."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..analysis.plots.score_norm import Curves, plot_score_norm_curves
from ..analysis.score_norm import (
    attended_profile,
    attended_words,
    curve_error,
    harmonic_others,
    recording_epochs,
    score_norm_curve,
    topic_purity,
)
from ..data import align_labels, load_classification
from ..data.word_counts import WordCounts
from ..training import LabelledSentences
from .arguments.score_norm import ScoreNormArguments
from .pictures import draw
from .run import write_csv, write_json
from .score_norm_plots import CLASSIFIER_NAMES, Series, plot_attended, plot_series
from .score_norm_stacks import TrainedStack, classifier_settings, save_first_runs, train_stack
from .summaries.score_norm import AttendedWords, CurveErrors, ExperimentResults


TREEBANK_SPLITS = ("train", "dev", "test")
UNKNOWN_WORD = 1  # 0 is padding
COMPETING_WORDS = ("powerful", "best")  # figure 5
ATTENDED_WORDS = ("worst", "mess", "stupid", "suffers", "solid")  # figure 6


class RecordedRun(NamedTuple):
    """Records of a run until it stopped: scores and norms have the shape `(epochs, words)`."""

    epochs: list[int]
    scores: torch.Tensor
    norms: torch.Tensor


def sentence_words(text: str, punctuation: bool) -> list[str]:
    """Words of a sentence; one unknown word if only punctuation was there and is removed."""
    return (text if punctuation else re.sub(r"[^\w\s]", "", text)).split() or ["[UNK]"]


def load_treebank(
    folder: str, punctuation: bool = True
) -> tuple[list[str], dict[str, tuple[list[list[int]], list[int]]]]:
    """Vocabulary of the training split; and sentences, as word indices, with labels by split."""
    loaded = {}
    for split in TREEBANK_SPLITS:
        files = sorted(Path(folder).glob(f"{split}.*"))
        if not files:
            raise ValueError(f"{folder} holds no file {split}.tsv, .csv, .jsonl, .json or .parquet.")
        if len(files) > 1:
            raise ValueError(f"{folder} holds {' and '.join(file.name for file in files)}; leave one of them.")
        texts = load_classification(files[0])
        names = (loaded["train"] if loaded else texts).features["label"].names
        if unknown := set(texts.features["label"].names) - set(names):
            raise ValueError(f"{files[0]} has the label {min(unknown)!r}, which the train file lacks.")
        # Each file numbers only its own classes.
        loaded[split] = align_labels(texts, names)
    sentences = {split: [sentence_words(text, punctuation) for text in one["text"]] for split, one in loaded.items()}
    known = {word for words in sentences["train"] for word in words} - {"[PAD]", "[UNK]"}
    vocabulary = ["[PAD]", "[UNK]", *sorted(known)]
    ids = {word: index for index, word in enumerate(vocabulary)}
    return vocabulary, {
        split: ([[ids.get(word, UNKNOWN_WORD) for word in words] for words in own], loaded[split]["label"][:])
        for split, own in sentences.items()
    }


def treebank(name: str, args: ScoreNormArguments, folder: Path, device: torch.device) -> ExperimentResults:
    """Figure 4, and with two classes figures 5 to 7: words of real sentences, none of which determines the class."""
    vocabulary, splits = load_treebank(getattr(args, name), args.punctuation)
    train, dev, test = (LabelledSentences(*splits[split], len(vocabulary)).to(device) for split in TREEBANK_SPLITS)
    num_labels, sizes = max(splits["train"][1]) + 1, args.sizes(name)
    settings = classifier_settings(
        args.classifiers, vocab_size=len(vocabulary), num_labels=num_labels, hidden_size=sizes.hidden_size
    )
    # A stack costs the same until all of it stops, and FC stops long after TC: each classifier has its own stack.
    dense = recording_epochs(sizes.epochs, 3 * args.records)
    trained = [
        train_stack(name, {classifier: own}, train, args, device, dev=dev, extra_records=dense)
        for classifier, own in settings.items()
    ]
    runs = {classifier: first_run(one) for classifier, one in zip(settings, trained)}
    counts = train.counts.to("cpu")
    purity = topic_purity(counts, train.labels.cpu()) if num_labels == 2 else None
    words = measure_words(runs, vocabulary, counts, purity, args.top_words)
    write_csv(folder / f"{name}_words.csv", [row for rows in words.values() for row in rows])
    write_json(folder / f"{name}_vocabulary.json", vocabulary)
    ids = {word: index for index, word in enumerate(vocabulary)}
    title = f"{name.upper().replace('SST', 'SST-')}, {len(splits['train'][0]):,} sentences; {CLASSIFIER_NAMES}"
    curves = [
        curve
        for classifier, rows in words.items()
        for curve in word_curves(classifier, runs[classifier], counts, [row["word"] for row in rows[:2]], ids)
    ]
    draw(plot_score_norm_curves, folder / f"{name}_curves", [curves], title)
    results = [one.results(test) for one in trained]
    attended = None
    if purity is not None:
        attended = draw_attended(runs, counts, purity, ids, folder / f"{name}_attended", title)
        if all(word in ids for word in COMPETING_WORDS):
            draw_competition(runs, counts, ids, folder / f"{name}_competition", title)
    text = Path(getattr(args, name)).resolve().name
    for one in trained:
        save_first_runs(one, folder / "models" / name, args, test, text, vocabulary)
    return ExperimentResults(
        **{key: {k: v for one in results for k, v in one[key].items()} for key in ("accuracy", "loss", "epochs")},
        seconds=sum(one["seconds"] for one in results),
        attended=attended,
        max_curve_error={
            classifier: CurveErrors(
                median=torch.tensor([row["curve_error"] for row in rows]).median().item(),
                below_tenth=sum(row["curve_error"] < 0.1 for row in rows) / len(rows),
            )
            for classifier, rows in words.items()
        },
        top_words={classifier: [row["word"] for row in rows] for classifier, rows in words.items()},
    )


def first_run(trained: TrainedStack) -> RecordedRun:
    history, last = trained.history, int(trained.result.epochs[0])
    # A run keeps its weights after it has stopped: the next record shows its end.
    epochs = [epoch for epoch in history.epochs if epoch < last] + [last]
    return RecordedRun(epochs, *(values[: len(epochs), 0] for values in (history.scores, history.norms)))


def measure_words(
    runs: dict[str, RecordedRun],
    vocabulary: list[str],
    counts: WordCounts,
    purity: torch.Tensor | None,
    top_words: int,
) -> dict[str, list[dict[str, Any]]]:
    """The words with the largest scores, by classifier: lines of the table of words."""
    found, others = {}, harmonic_others(counts)
    for name, (_, scores, norms) in runs.items():
        # Words that training does not contain have no curve.
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


def word_curves(
    classifier: str, run: RecordedRun, counts: WordCounts, words: list[str], ids: dict[str, int]
) -> list[Curves]:
    others = harmonic_others(counts)
    indices = {word: [ids[word]] for word in words}
    return [
        Curves(f"{classifier}: {word}", run.scores[:, index], run.norms[:, index], others[index].item())
        for word, index in indices.items()
    ]


def draw_competition(
    runs: dict[str, RecordedRun], counts: WordCounts, ids: dict[str, int], path: Path, title: str
) -> None:
    """Figure 5: a frequent word gets attention first, until a rarer word of higher purity overtakes it."""
    pair = [ids[word] for word in COMPETING_WORDS]
    starts = counts.word_starts
    sentences = [set(counts.sentences_by_word[starts[word] : starts[word + 1]].tolist()) for word in pair]
    with_both = min(set.intersection(*sentences), default=None)
    curves, series = [], []
    for classifier, run in runs.items():
        curves.append(word_curves(classifier, run, counts, list(COMPETING_WORDS), ids))
        kinds = {"score": run.scores[:, pair], "norm": run.norms[:, pair]}
        if with_both is not None:
            entries = slice(*counts.sentence_starts[with_both : with_both + 2].tolist())
            words = counts.words[entries].tolist()
            weights = (run.scores[:, words] + counts.counts[entries].log()).softmax(-1)
            kinds["weight where both occur"] = weights[:, [words.index(word) for word in pair]]
        series.append(
            [
                Series(f"{classifier}: {kind}", kind.split()[0], run.epochs, dict(zip(COMPETING_WORDS, values.T)))
                for kind, values in kinds.items()
            ]
        )
    draw(plot_score_norm_curves, path.with_name(f"{path.name}_curves"), curves, title)
    draw(plot_series, path, series, title)


def draw_attended(
    runs: dict[str, RecordedRun], counts: WordCounts, purity: torch.Tensor, ids: dict[str, int], path: Path, title: str
) -> dict[str, AttendedWords]:
    """Figures 6 and 7: attention moves from frequent words to words that predict a class."""
    words = [word for word in ATTENDED_WORDS if word in ids]
    profiles: dict[str, dict[str, tuple]] = {}
    for classifier, run in runs.items():
        attended = [attended_words(scores, counts) for scores in run.scores]
        # The empty word is for all sentences.
        profiles[classifier] = {
            word: (run.epochs, *zip(*(attended_profile(one, counts, purity, ids.get(word)) for one in attended)))
            for word in ("", *words)
        }
    if words:
        by_word = {classifier: {word: own[word] for word in words} for classifier, own in profiles.items()}
        draw(plot_attended, path.with_name(f"{path.name}_by_word"), by_word, title)
    draw(plot_attended, path, {"": {classifier: own[""] for classifier, own in profiles.items()}}, title)
    return {
        classifier: AttendedWords(
            purity_first=purities[0],
            purity_last=purities[-1],
            occurrences_first=occurrences[0],
            occurrences_last=occurrences[-1],
        )
        for classifier, own in profiles.items()
        for _, purities, occurrences in [own[""]]
    }
