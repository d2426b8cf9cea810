# Licensed under the Apache License, Version 2.0.
"""The jobs of the command line: a module each, whose function `main` takes the flags in `arguments`."""

PROGRAM = "hf-attn"  # the command that runs them
JOBS = (
    "pretrain_ag",
    "finetune",
    "run_glue",
    "prune_heads",
    "analyze_heads",
    "attribute_heads",
    "probe_coreference",
    "supervise_mlm",
    "supervise_classifier",
    "distil_heads",
    "train_translation",
    "compare_translation",
    "align_translation",
    "train_lstm_translation",
    "lexical_knowledge",
    "learn_to_copy",
    "keyword_drift",
    "score_norm",
    "sweep",
    "merge_curves",
    "redraw",
    "reproduction",
)
