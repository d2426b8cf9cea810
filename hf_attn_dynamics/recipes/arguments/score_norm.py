# Licensed under the Apache License, Version 2.0.
"""Flags of `score_norm`."""

from dataclasses import dataclass

from .base import LoopArguments, PublishArguments, check_names, flag, refuse_flags, with_default


CLASSIFIERS = {
    "FC": {"classifier": "fixed"},
    "TC": {"classifier": "linear"},
    "TL": {"classifier": "mlp"},
    "TC-KF": {"classifier": "linear", "freeze_keys": True},
    "TC-EF": {"classifier": "linear", "freeze_embeddings": True},
}
TREEBANKS = ("sst2", "sst5")  # experiments on real sentences


@dataclass(frozen=True)
class Sizes:
    """Number of seeds, epochs and embedding size of an experiment, as in the paper where it names them."""

    num_seeds: int
    epochs: int
    hidden_size: int = 15


EXPERIMENTS = {
    "synthetic": Sizes(5, 5_000),
    "ablation": Sizes(1, 60_000),
    "sst2": Sizes(1, 300_000, 200),
    "sst5": Sizes(1, 300_000, 200),
    "cnn": Sizes(10, 3_000),
    "query": Sizes(1, 5_000),
}


@dataclass
class ScoreNormArguments(PublishArguments, LoopArguments):
    """Flags of `score_norm`: experiment, sizes and files."""

    output_dir: str = with_default("runs/score_norm", LoopArguments, "output_dir")
    experiment: str = flag("synthetic", f"Experiment: {', '.join(EXPERIMENTS)} or all.")
    sst2: str | None = flag(None, "Folder with the files train, dev and test of SST-2, with labels 0 and 1.")
    sst5: str | None = flag(None, "Folder with the files train, dev and test of SST-5, with labels from 0 to 4.")
    punctuation: bool = flag(True, "Keep the punctuation of SST-2 and SST-5.")
    classifiers: list[str] = flag(
        ["FC", "TC"], f"Classifiers for SST-2 and SST-5: {', '.join(CLASSIFIERS)}.", earlier="models"
    )
    num_seeds: int | None = flag(
        None, "Number of initial weights per classifier; the paper's by default.", earlier="runs"
    )
    epochs: int | None = flag(None, "Maximum number of updates; the paper's by default.")
    hidden_size: int | None = flag(None, "Size of the embeddings; the paper's by default.")
    learning_rate: float = flag(0.1, "Learning rate η of gradient descent.")
    patience: int = flag(100, "Epochs without a lower loss on dev after which training stops.")
    records: int = flag(100, "Number of evenly spaced records of scores and norms, and as many early ones.")
    top_words: int = flag(50, "Number of words of SST-2 and SST-5 whose curves are measured.")

    def __post_init__(self):
        super().__post_init__()
        if self.experiment not in (*EXPERIMENTS, "all"):
            raise ValueError(f"experiment must be {', '.join(EXPERIMENTS)} or all, got {self.experiment!r}.")
        self.check_at_least(1, "num_seeds", "epochs", "hidden_size", "patience", "records", "top_words")
        self.check_positive("learning_rate")
        check_names("classifiers", self.classifiers, CLASSIFIERS)
        if self.experiment in TREEBANKS and getattr(self, self.experiment) is None:
            raise ValueError(
                f"experiment {self.experiment} needs --{self.experiment}, a folder with train, dev and test files."
            )
        unread = {
            name: f"only the experiment {name} reads it" for name in TREEBANKS if self.experiment not in (name, "all")
        }
        if not set(TREEBANKS) & set(self.experiments()):
            of_words = ("punctuation", "classifiers", "patience", "top_words")
            unread |= dict.fromkeys(of_words, f"only the experiments {' and '.join(TREEBANKS)} read it")
        refuse_flags(self, unread)

    def experiments(self) -> list[str]:
        """Names of the experiments to run; `all` leaves out those without files."""
        if self.experiment != "all":
            return [self.experiment]
        return [name for name in EXPERIMENTS if name not in TREEBANKS or getattr(self, name)]

    def sizes(self, experiment: str) -> Sizes:
        own = EXPERIMENTS[experiment]
        return Sizes(*(getattr(self, name) or getattr(own, name) for name in ("num_seeds", "epochs", "hidden_size")))


ARGUMENTS, HAS_TRAINER, PRESETS = ScoreNormArguments, False, None
