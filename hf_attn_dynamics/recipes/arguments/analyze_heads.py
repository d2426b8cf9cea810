# Licensed under the Apache License, Version 2.0.
"""Flags of `analyze_heads`."""

from dataclasses import dataclass

from ...analysis.contribution_names import CONTRIBUTIONS, check_contributions
from .base import LoopArguments, flag, with_default
from .reading import ReadingArguments


@dataclass
class AnalyzeArguments(ReadingArguments):
    """Flags of `analyze_heads`: model, sentences, and how many of them the slower measures use."""

    output_dir: str = with_default("runs/analyze_heads", LoopArguments, "output_dir")
    relations: list[str] | None = flag(
        None, "Dependency relations to test heads for; by default nsubj, obj, amod, advmod, det and case."
    )
    pruned: list[str] | None = flag(
        None, "Pruned checkpoints of the same model; the report compares the functions of the remaining heads."
    )
    compare: str | None = flag(
        None,
        "Checkpoint of another version of the model (pruned, guided, another step of training), which reads the same "
        "sentences; the report shows both side by side, and what moved.",
    )
    compare_name: str | None = flag(None, "Name of the model of --compare in the report; the checkpoint by default.")
    contributions: list[str] | None = flag(
        None,
        f"Contributions to show beside attention in the example sentences of the report: some of "
        f"{', '.join(CONTRIBUTIONS)}. The report then has fewer sentences.",
    )
    frequent: int = flag(500, "Number of tokens that count as frequent when heads are tested for rare words.")
    importance_sentences: int = flag(256, "Sentences to compute gradient importance on; 0 skips it.")
    relevance_sentences: int = flag(32, "Sentences to compute relevance (LRP) on; 0 skips it.")

    def __post_init__(self):
        super().__post_init__()
        if self.compare_name is not None and self.compare is None:
            raise ValueError(f"compare_name={self.compare_name!r} needs --compare.")
        check_contributions(self.contributions or ())
        self.check_at_least(1, "frequent")
        self.check_at_least(0, "importance_sentences", "relevance_sentences")


ARGUMENTS, HAS_TRAINER, PRESETS = AnalyzeArguments, False, None
