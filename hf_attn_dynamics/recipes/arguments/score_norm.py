# Licensed under the Apache License, Version 2.0.
"""Flags of `score_norm`."""

from dataclasses import dataclass, field

from .base import PublishArguments, check_names, refuse_flags


MODELS = {
    "FC": {"classifier": "fixed"},
    "TC": {"classifier": "linear"},
    "TL": {"classifier": "mlp"},
    "TC-KF": {"classifier": "linear", "freeze_keys": True},
    "TC-EF": {"classifier": "linear", "freeze_embeddings": True},
}
TREEBANKS = ("sst2", "sst5")  # experiments on real sentences


@dataclass(frozen=True)
class Sizes:
    """Runs, epochs and embedding size of an experiment, as in the paper where it names them."""

    runs: int
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
class ScoreNormArguments(PublishArguments):
    """Which experiment, how long, on which files."""

    output_dir: str = field(default="runs/score_norm", metadata={"help": "Where to write; may not hold another run."})
    experiment: str = field(default="synthetic", metadata={"help": f"{', '.join(EXPERIMENTS)} or all."})
    sst2: str | None = field(default=None, metadata={"help": "Folder with files train, dev and test, labels 0 and 1."})
    sst5: str | None = field(default=None, metadata={"help": "The same with labels from 0 to 4."})
    punctuation: bool = field(default=True, metadata={"help": "Whether words of sst2 and sst5 keep it."})
    models: list[str] = field(
        default_factory=lambda: ["FC", "TC"], metadata={"help": f"Of sst2 and sst5: some of {', '.join(MODELS)}."}
    )
    runs: int | None = field(default=None, metadata={"help": "Initial weights of each model; the paper's by default."})
    epochs: int | None = field(default=None, metadata={"help": "Most updates of a run; the paper's by default."})
    hidden_size: int | None = field(default=None, metadata={"help": "Size of embeddings; the paper's by default."})
    learning_rate: float = field(default=0.1, metadata={"help": "η of gradient descent."})
    patience: int = field(default=100, metadata={"help": "Epochs without progress on dev until a run stops."})
    records: int = field(
        default=100, metadata={"help": "Times to record scores and norms: evenly, and as often early."}
    )
    top_words: int = field(default=50, metadata={"help": "Words of sst2 and sst5 whose curves are measured."})
    seed: int = field(default=0, metadata={"help": "Of sentences; that of initial weights is one more in each run."})
    disable_tqdm: bool = field(default=False, metadata={"help": "No progress bars."})

    def __post_init__(self):
        super().__post_init__()
        if self.experiment not in (*EXPERIMENTS, "all"):
            raise ValueError(f"experiment must be {', '.join(EXPERIMENTS)} or all, got {self.experiment!r}.")
        self.check_at_least(1, "runs", "epochs", "hidden_size", "patience", "records", "top_words")
        self.check_at_least(0, "seed")
        self.check_positive("learning_rate")
        check_names("models", self.models, MODELS)
        if self.experiment in TREEBANKS and getattr(self, self.experiment) is None:
            raise ValueError(
                f"experiment {self.experiment} needs --{self.experiment}, a folder with train, dev and test files."
            )
        unread = {name: f"it is of experiment {name}" for name in TREEBANKS if self.experiment not in (name, "all")}
        if not set(TREEBANKS) & set(self.experiments()):
            of_words = ("punctuation", "models", "patience", "top_words")
            unread |= dict.fromkeys(of_words, f"it is of the experiments {' and '.join(TREEBANKS)}")
        refuse_flags(self, unread)

    def experiments(self) -> list[str]:
        """Names of the experiments to make: all those for which there are files, if no single one is asked for."""
        if self.experiment != "all":
            return [self.experiment]
        return [name for name in EXPERIMENTS if name not in TREEBANKS or getattr(self, name)]

    def sizes(self, experiment: str) -> Sizes:
        own = EXPERIMENTS[experiment]
        return Sizes(*(getattr(self, name) or getattr(own, name) for name in ("runs", "epochs", "hidden_size")))


ARGUMENTS, HAS_TRAINER, PRESETS = ScoreNormArguments, False, None
