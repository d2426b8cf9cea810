import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_config, vivid
from transformers import AutoModel

from hf_attn_dynamics import read_heads
from hf_attn_dynamics.data import embedded_sentences, embedded_trees, load_conllu, train_byte_level_bpe


ROOT = Path(__file__).parents[3]
FILE = ROOT / "hf_attn_dynamics" / "data" / "demo" / "sentences.conllu"
# Of Universal Dependencies 2, as far as English sentences of these kinds need them.
RELATIONS = {
    *("acl:relcl", "advcl", "advmod", "amod", "appos", "aux", "aux:pass", "case", "cc", "ccomp", "conj", "cop"),
    *("csubj", "det", "expl", "flat", "iobj", "mark", "nmod", "nmod:poss", "nsubj", "nsubj:pass", "nummod", "obj"),
    *("obl", "obl:agent", "punct", "root", "xcomp"),
}
# The only relation that words of these parts of speech have.
FUNCTION_WORDS = {"PUNCT": {"punct"}, "CCONJ": {"cc"}, "SCONJ": {"mark"}, "ADP": {"case"}, "DET": {"det"}}


@pytest.fixture(scope="module")
def trees():
    return embedded_sentences()


def dependents(tree, head):
    return [tree.relations[index] for index, above in enumerate(tree.heads) if above == head]


def test_there_are_twenty_sentences_of_six_to_eighteen_words(trees):
    assert len({tree.text for tree in trees}) == len(trees) == 20
    assert not {tree.text for tree in trees} & {tree.text for tree in embedded_trees()}
    assert {len(tree.words) for tree in trees} <= set(range(6, 19))
    assert [tree.source for tree in trees] == [f"sentence-{number}" for number in range(1, 21)]


def test_each_tree_has_one_root_and_reaches_it_from_every_word(trees):
    for tree in trees:
        assert [relation == "root" for relation in tree.relations] == [head is None for head in tree.heads]
        assert tree.heads.count(None) == 1
        for index in range(len(tree.words)):
            path = []
            while index is not None:
                assert index not in path, tree.text
                path.append(index)
                index = tree.heads[index]


def test_trees_are_projective(trees):
    for tree in trees:
        arcs = [sorted((index, head)) for index, head in enumerate(tree.heads) if head is not None]
        assert not [tree.text for a, b in arcs for c, d in arcs if a < c < b < d]


def test_relations_are_those_of_universal_dependencies_and_fit_the_parts_of_speech(trees):
    found = Counter(relation for tree in trees for relation in tree.relations)
    assert set(found) == RELATIONS
    assert min(found[name] for name in ("nsubj", "obj", "amod", "advmod", "det", "case")) >= 10
    for tree in trees:
        for tag, relation in zip(tree.upos, tree.relations):
            assert relation in FUNCTION_WORDS.get(tag, {relation}), tree.text
            assert tag == "AUX" or relation not in ("aux", "aux:pass", "cop"), tree.text
        for index, relation in enumerate(tree.relations):
            below = dependents(tree, index)
            # Function words have no dependents, a clause has at most one subject and one object, and what has a
            # passive auxiliary has a passive subject.
            assert relation not in ("case", "cc", "det", "mark", "aux", "aux:pass", "cop", "punct") or not below
            assert max(Counter(below)[name] for name in ("obj", "nsubj", "nsubj:pass", "cop")) <= 1
            assert ("aux:pass" in below) == ("nsubj:pass" in below)
            assert ("iobj" in below) <= ("obj" in below)
            assert ("obl:agent" in below) <= ("aux:pass" in below)


def test_the_file_says_what_is_read(trees):
    comments = [line for line in FILE.read_text(encoding="utf-8").splitlines() if line.startswith("# text = ")]
    assert [line.removeprefix("# text = ") for line in comments] == [tree.text for tree in trees]
    for tree in trees:
        assert [tree.text[start:stop] for start, stop in tree.spans] == list(tree.words)


def test_a_tree_survives_being_written_and_read_again(trees, tmp_path):
    rows = []
    for tree in trees:
        rows.append(f"# sent_id = {tree.source}")
        for index, (word, tag, head, relation) in enumerate(zip(tree.words, tree.upos, tree.heads, tree.relations)):
            last = index + 1 == len(tree.words)
            misc = "_" if last or tree.spans[index + 1][0] > tree.spans[index][1] else "SpaceAfter=No"
            above = "0" if head is None else str(head + 1)
            rows.append("\t".join([str(index + 1), word, "_", tag, "_", "_", above, relation, "_", misc]))
        rows.append("")
    path = tmp_path / "again.conllu"
    path.write_text("\n".join([*rows, ""]), encoding="utf-8")
    assert load_conllu(path) == load_conllu(FILE) == trees


def test_reading_heads_with_them_measures_syntactic_roles(trees):
    tokenizer = train_byte_level_bpe([tree.text for tree in trees], 400, kind="bert")
    config = tiny_config("bert", vocab_size=len(tokenizer), max_position_embeddings=80, sep_token_id=3)
    torch.manual_seed(0)
    reading = read_heads(vivid(AutoModel.from_config(config)), trees, tokenizer, frequent=20)
    roles = reading["syntactic_roles"]
    assert {f"{name} to head" for name in ("nsubj", "obj", "amod", "advmod", "det", "case")} <= set(roles.accuracy)
    assert roles.counts["det to head"] == {"encoder": 43}
    assert roles.skipped["too long"] == roles.skipped["unknown sentence"] == 0


def test_the_file_is_installed_with_the_package(tmp_path):
    """`build_py` copies what a wheel contains."""
    lib, code = tmp_path / "lib", "from hf_attn_dynamics.data import embedded_sentences as get; print(len(get()))"
    build = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(lib)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    assert (lib / FILE.relative_to(ROOT)).read_bytes() == FILE.read_bytes()
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(lib)!r}); {code}"],
                          cwd=tmp_path, check=True, capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.stdout == "20\n"
