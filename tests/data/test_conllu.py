# Licensed under the Apache License, Version 2.0.
import gzip
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from hf_attn_dynamics.data import Tree, embedded_trees, load_conllu, parse_with_spacy


def line(identifier, form, head="_", relation="_", upos="X", misc="_"):
    return "\t".join([identifier, form, "_", upos, "_", "_", head, relation, "_", misc])


DOGS = [
    line("1", "Dogs", "2", "nsubj", "NOUN"),
    line("2", "bark", "0", "root", "VERB", "SpaceAfter=No"),
    line("3", "!", "2", "punct", "PUNCT"),
]
# "don't" is two words that are found in it, "im" two that are not; a verb that is not said is an empty node.
SENTENCES = [
    "# newdoc",
    "# sent_id = first",
    "# text = Dogs don't bark im Haus.",
    line("1", "Dogs", "4", "nsubj"),
    line("2-3", "don't"),
    line("2", "do", "4", "aux", misc="SpaceAfter=No"),
    line("3", "n't", "4", "advmod"),
    line("4", "bark", "0", "root"),
    line("4.1", "said"),
    line("5-6", "im", misc="Note=x|SpaceAfter=Yes"),
    line("5", "in", "7", "case"),
    line("6", "dem", "7", "det"),
    line("7", "Haus", "4", "obl:loc", misc="Note=x|SpaceAfter=No"),
    line("8", ".", "4", "punct"),
    "",
    "",
    *DOGS,
]


def write(folder, lines, name="some.conllu", end="\n"):
    path = folder / name
    path.write_bytes(end.join([*lines, ""]).encode())
    return path


def test_words_heads_and_relations_are_read(tmp_path):
    path = write(tmp_path, SENTENCES)
    first, second = load_conllu(path)
    assert first.words == ("Dogs", "do", "n't", "bark", "in", "dem", "Haus", ".")
    assert first.heads == (3, 3, 3, None, 6, 6, 3, 3)
    assert first.relations == ("nsubj", "aux", "advmod", "root", "case", "det", "obl:loc", "punct")
    assert first.source == "first"
    assert second == Tree(
        words=("Dogs", "bark", "!"),
        heads=(1, None, 1),
        relations=("nsubj", "root", "punct"),
        upos=("NOUN", "VERB", "PUNCT"),
        text="Dogs bark!",
        source=f"{path}, line 17",
    )


def test_words_are_where_they_are_written(tmp_path):
    first, second = load_conllu(write(tmp_path, SENTENCES))
    assert first.text == "Dogs don't bark im Haus."
    found = [first.text[start:stop] for start, stop in first.spans]
    assert found == ["Dogs", "do", "n't", "bark", "im", "im", "Haus", "."]
    assert [second.text[start:stop] for start, stop in second.spans] == list(second.words)
    assert first.spaced().text == "Dogs do n't bark in dem Haus ."
    assert first.spaced().spans[-2:] == ((24, 28), (29, 30))


def test_files_come_in_all_ways(tmp_path):
    expected = [tree.words for tree in load_conllu(write(tmp_path, SENTENCES))]
    (tmp_path / "more").mkdir()
    windows = write(tmp_path / "more", SENTENCES, "windows.conllu", end="\r\n")
    (tmp_path / "more" / "zipped.conllu.gz").write_bytes(gzip.compress(windows.read_bytes()))
    (tmp_path / "more" / "ends.conllu").write_text("\ufeff" + "\n".join(SENTENCES), encoding="utf-8")
    assert [tree.words for tree in load_conllu(tmp_path / "more")] == 3 * expected
    assert [tree.words for tree in load_conllu([str(windows), tmp_path / "so*.conllu"])] == 2 * expected


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*DOGS, "4\tloud\t_"], "line 4: 3 tab-separated columns; CoNLL-U has ten"),
        ([*DOGS, "# text"], "line 4: 1 tab-separated columns"),
        ([line("1", "Dogs", "2", "nsubj").replace("\t", "  ")], "line 1: 1 tab-separated columns"),
        ([line("one", "Dogs", "0", "root")], r"line 1: 'one' is not the id of a word \(3\)"),
        ([*DOGS, line("3", "?", "2", "punct")], "line 4: 3 is out of order; word 4 is next"),
        ([*DOGS, line("5", "?", "2", "punct")], "line 4: 5 is out of order"),
        ([line("1-2", "im"), *DOGS[:1], line("2-3", "x"), *DOGS[1:]], "line 3: 2-3 is out of order"),
        ([line("2-1", "im"), *DOGS], "line 1: 2-1 is out of order"),
        ([*DOGS, line("4-5", "im"), line("4", "in", "2", "case")], "line 4: words of the token are missing"),
        ([line("1", "", "0", "root")], "line 1: the form is empty"),
        ([line("1.1", "said")], "line 1: the sentence has no words"),
        ([*DOGS, line("4", "loud", "_", "advmod")], "line 4: the head '_' is not a number"),
        ([*DOGS, line("4", "loud", "-1", "advmod")], "line 4: the head '-1' is not a number"),
        ([*DOGS, line("4", "loud", "2")], "line 4: 'loud' has no relation to its head"),
        ([*DOGS, line("4", "loud", "5", "advmod")], "line 4: 'loud' has a head that is not one of the 4 words"),
        ([*DOGS, line("4", "loud", "0", "root")], "line 4: 'loud' is a second root"),
        ([DOGS[0], line("2", "bark", "1", "x")], "line 1: 'Dogs' begins a sentence without a root"),
        ([*DOGS, line("4", "loud", "4", "advmod")], "line 4: 'loud' is in a cycle"),
        (
            [*DOGS, line("4", "very", "5", "advmod"), line("5", "loud", "4", "advmod")],
            "line 4: 'very' is in a cycle, or depends on a word in a cycle",
        ),
        (["# only comments"], "some.conllu has no sentence"),
    ],
)
def test_broken_lines_are_named(lines, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_conllu(write(tmp_path, lines))


def test_lines_are_counted_over_sentences(tmp_path):
    with pytest.raises(ValueError, match=r"some\.conllu, line 22: 'loud' is a second root"):
        load_conllu(write(tmp_path, [*SENTENCES, "", line("1", "so", "0", "root"), line("2", "loud", "0", "root")]))


def test_broken_files_are_named(tmp_path):
    path = write(tmp_path, SENTENCES)
    path.write_bytes(path.read_bytes().replace(b"Haus\t", b"H\xe4us\t"))
    with pytest.raises(ValueError, match="is not in UTF-8: byte 0xe4 .*, in line 13"):
        load_conllu(path)
    with pytest.raises(ValueError, match="has an unsupported suffix; supported are .conllu, each also as .gz"):
        load_conllu(write(tmp_path, SENTENCES, "some.txt"))
    with pytest.raises(FileNotFoundError):
        load_conllu(tmp_path / "none.conllu")


# ---- Trees ----------------------------------------------------------------------------------------------------------

TREE = {"words": ("Dogs", "bark"), "heads": (1, None), "relations": ("nsubj", "root"), "source": "dogs"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"words": ()}, "dogs has no word"),
        ({"heads": (1, None, 1)}, "dogs has 2 words, but 3 heads"),
        ({"upos": ("NOUN",)}, "dogs has 2 words, but 1 upos"),
        ({"heads": (2, None)}, "dogs: word 0, 'Dogs', has a head that is not one of the 2 words"),
        ({"heads": (-1, None)}, "has a head that is not one"),
        ({"heads": (None, None)}, "word 1, 'bark', is a second root"),
        ({"text": "Cats bark"}, "dogs: 'Dogs' does not follow the preceding words in 'Cats bark'"),
        ({"source": "", "heads": (1, 0)}, "a tree: word 0, 'Dogs', begins a sentence without a root"),
    ],
)
def test_trees_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Tree(**{**TREE, **changes})


def test_embedded_trees_are_of_english_sentences():
    trees = embedded_trees()
    assert len({tree.text for tree in trees}) == len(trees) == 30
    relations = Counter(relation for tree in trees for relation in tree.relations)
    assert min(relations[name] for name in ("nsubj", "obj", "amod", "advmod", "det", "case")) >= 10
    for tree in trees:
        for position, (relation, head) in enumerate(zip(tree.relations, tree.heads)):
            assert tree.upos[position] == "DET" or relation != "det"
            assert (relation == "root") == (head is None)
            # Noun phrases are whole: what is between a determiner and its noun depends on that noun.
            if relation == "det":
                assert all(tree.heads[between] == head for between in range(position, head))


def test_real_treebanks_are_read_whole(real_data):
    trees = load_conllu(real_data / "ud-en-ewt" / "en_ewt-ud-dev.conllu.gz")
    assert len(trees) == 2001
    assert sum(len(tree.words) for tree in trees) == 25147
    german = load_conllu(real_data / "ud-de-gsd")
    assert any(len(set(tree.spans)) < len(tree.words) for tree in german)


# ---- spaCy ----------------------------------------------------------------------------------------------------------


class Pipeline:
    """What is used of a pipeline of spaCy: each word depends on the first of its sentence; lines are sentences."""

    def pipe(self, texts):
        for text in texts:
            tokens, start = [], 0
            for word in text.replace("\n", " \n ").split(" "):
                index = text.index(word, start)
                token = SimpleNamespace(
                    i=len(tokens), idx=index, text=word, is_space=word == "\n", pos_="X", dep_="dep"
                )
                tokens.append(token)
                start = index + len(word)
            sentences = [[]]
            for token in tokens:
                sentences[-1].append(token)
                token.head = sentences[-1][0]
                if token.is_space:
                    sentences.append([])
            yield SimpleNamespace(text=text, sents=sentences)


def test_parsed_sentences_become_trees():
    trees = parse_with_spacy(["Dogs bark loud\nCats do not", "Yes"], Pipeline())
    assert trees[1] == Tree(
        words=("Cats", "do", "not"),
        heads=(None, 0, 0),
        relations=("root", "dep", "dep"),
        upos=("X", "X", "X"),
        text="Cats do not",
        source="text 1, sentence 2",
    )
    assert [tree.source for tree in trees] == ["text 1, sentence 1", "text 1, sentence 2", "text 2, sentence 1"]


def test_without_spacy_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(ImportError, match="pip install spacy, python -m spacy download en_core_web_sm"):
        parse_with_spacy(["Dogs bark"])


@pytest.mark.parametrize("left_out", [{"heads": ()}, {"relations": ()}])
def test_a_tree_has_a_head_and_a_relation_for_each_word(left_out):
    with pytest.raises(ValueError, match="a tree has 2 words, but 0 "):
        Tree(**{"words": ("a", "b"), "heads": (None, 0), "relations": ("root", "x"), **left_out})
