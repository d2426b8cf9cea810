# Licensed under the Apache License, Version 2.0.
"""Trains a tiny LSTM encoder–decoder for one step on one process of two: translation_worker.py OUTPUT."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent / "reference"))

from tiny_lstms import tiny_lexical, translation_trainer  # noqa: E402


def main(output: str) -> None:
    trainer = translation_trainer(
        tiny_lexical("LstmSeq2SeqForConditionalGeneration"), output, per_device_train_batch_size=3
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(sys.argv[1])
