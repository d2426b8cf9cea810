# Licensed under the Apache License, Version 2.0.
"""Lexicons of words with a class, and the rationales that follow from them."""

import gzip

import pytest

from hf_attn_dynamics.data.lexicons import learn_lexicon, load_lexicon, rationale


TEXTS = ["A fine film!", "fine, fine acting", "the film is a bore", "a bore of a film", "fine?"]
LABELS = ["1", "1", "0", "0", "0"]


def test_single_words_of_a_table_are_the_lexicon_and_words_of_two_classes_are_left_out(tmp_path):
    rows = ["fine\t1", "a fine film\t1", "BORE\t0", "(dull)\t0", "Odd\t1", "odd\t0", "!\t1"]
    with gzip.open(tmp_path / "phrases.tsv.gz", "wt") as file:
        file.write("\n".join(rows) + "\n")
    assert load_lexicon(tmp_path / "phrases.tsv.gz") == {"fine": "1", "bore": "0", "dull": "0"}
    named = load_lexicon(tmp_path / "phrases.tsv.gz", label_names=["bad", "good"])
    assert named == {"fine": "good", "bore": "bad", "dull": "bad"}


def test_a_table_without_single_words_is_refused(tmp_path):
    (tmp_path / "phrases.tsv").write_text("a fine film\t1\na bore\t0\n")
    with pytest.raises(ValueError, match="the 2 phrases of the lexicon have no single word"):
        load_lexicon(tmp_path / "phrases.tsv")


def test_learnt_words_occur_in_enough_texts_most_of_which_have_their_class():
    # fine: 1, 1, 0; film: 1, 0, 0; a: 1, 0, 0; bore: 0, 0.
    assert learn_lexicon(TEXTS, LABELS, 2, 0.9) == {"bore": "0"}
    assert learn_lexicon(TEXTS, LABELS, 3, 0.6) == {"a": "0", "fine": "1", "film": "0"}
    assert learn_lexicon(TEXTS, LABELS, 4, 0.0) == {}


def test_words_of_a_known_lexicon_are_left_out_if_they_occur_in_texts_of_other_classes():
    known = {"fine": "1", "film": "1", "unseen": "0", "acting": "0"}
    assert learn_lexicon(TEXTS, LABELS, 3, 0.6, known) == {"fine": "1", "unseen": "0", "acting": "0"}
    assert learn_lexicon(TEXTS, LABELS, 1, 0.6, known) == {"fine": "1", "unseen": "0"}
    assert learn_lexicon(TEXTS, LABELS, 1, 0.0, known) == known


def test_a_rationale_has_the_words_of_the_class_at_their_characters():
    lexicon = {"fine": "1", "dull": "0"}
    text = "Fine  and (dull), but fine!"
    spans, weights = rationale(text, "1", lexicon)
    assert [text[start:end] for start, end in spans] == ["Fine", "and", "(dull),", "but", "fine!"]
    assert weights == [1, 0, 0, 0, 1]
    assert rationale(text, "0", lexicon)[1] == [0, 0, 1, 0, 0]


def test_texts_without_labels_are_refused():
    with pytest.raises(ValueError, match="there are 2 texts, but 1 labels"):
        learn_lexicon(["a", "b"], ["0"], min_count=1)
