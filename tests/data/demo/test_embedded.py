import re
import subprocess
import sys

import pytest

from hf_attn_dynamics.data import embedded_corpus, embedded_splits
from hf_attn_dynamics.data.demo import embedded


SIZE = 400_000


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("embedded")


@pytest.fixture(scope="module")
def documents(cache_dir):
    return embedded_corpus(cache_dir, SIZE)


def forbid_extraction(monkeypatch):
    def fail(*_):
        raise AssertionError("extracted although there is a cache")

    monkeypatch.setattr(embedded, "_extract", fail)


def paragraphs(docstring):
    return [text for run in embedded._runs(docstring) if run and (text := embedded._paragraph(run))]


def test_corpus_fills_the_size_asked_for(documents):
    assert 0.95 * SIZE < len("\n".join(documents)) <= SIZE


def test_corpus_is_the_same_in_another_process_with_other_hashes(documents, tmp_path):
    code = f"from hf_attn_dynamics.data import embedded_corpus; embedded_corpus({str(tmp_path)!r}, {SIZE})"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONHASHSEED": "7"})
    (cache,) = tmp_path.iterdir()
    assert cache.read_text(encoding="utf-8") == "\n\n".join(documents)


def test_corpus_has_no_paragraph_twice(documents):
    found = [paragraph for document in documents for paragraph in document.split("\n")]
    assert len(found) == len(set(found))


def test_corpus_is_free_of_code_and_markup(documents):
    text = "\n".join(documents)
    assert not re.findall(r">>>|```|::|https?:|self\.\w|\bdef \w+\(|[{}<>=|\\_`\[\]]", text)


def test_every_paragraph_is_made_of_whole_sentences(documents):
    for document in documents:
        for paragraph in document.split("\n"):
            assert re.fullmatch(r"[\"'(]?[A-Z].*[.!?][\"')]*", paragraph), paragraph
            assert len(paragraph.split()) >= 10


def test_a_second_call_reads_the_cache(documents, cache_dir, monkeypatch):
    forbid_extraction(monkeypatch)
    assert embedded_corpus(cache_dir, SIZE) == documents


@pytest.mark.parametrize("change", ["rules", "version", "place", "size"])
def test_a_cache_serves_no_other_rules_installation_or_size(change, cache_dir, documents, monkeypatch):
    size = SIZE
    sources = embedded._sources()
    if change == "rules":
        monkeypatch.setattr(embedded, "RULES_VERSION", embedded.RULES_VERSION + 1)
    elif change == "version":
        monkeypatch.setattr(embedded, "_sources", lambda: [(name + ".post1", root) for name, root in sources])
    elif change == "place":
        monkeypatch.setattr(embedded, "_sources", lambda: [(name, root / "elsewhere") for name, root in sources])
    else:
        size += 1
    forbid_extraction(monkeypatch)
    with pytest.raises(AssertionError, match="extracted"):
        embedded_corpus(cache_dir, size)


def test_an_interrupted_write_leaves_no_cache(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        embedded_corpus(tmp_path, 3000)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_only_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    assert embedded_corpus(tmp_path / "file", 3000)
    assert "could not be cached" in caplog.text


def test_the_default_cache_follows_xdg_cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    embedded_corpus(max_characters=3000)
    assert len(list((tmp_path / "hf_attn_dynamics").glob("embedded-*.txt"))) == 1


def test_splits_share_no_paragraph_and_lose_no_document(documents, cache_dir):
    train, validation = embedded_splits(cache_dir, SIZE, every=10)
    assert sorted(train + validation) == sorted(documents)
    assert len(validation) == len(documents) // 10
    first, second = ({line for text in split for line in text.split("\n")} for split in (train, validation))
    assert first.isdisjoint(second)


def test_prose_loses_its_markup():
    docstring = """Returns the :class:`~a.Tensor` of ``values`` that [`~b.Model`] **always** needs for
    the `next step <https://example.org>`_ in a [long chain](https://example.org) of steps [1]_."""
    assert paragraphs(embedded.cleandoc(docstring)) == [
        "Returns the Tensor of values that Model always needs for the next step in a long chain of steps."
    ]


def test_argument_lists_code_and_tables_are_left_out():
    docstring = """
    The first paragraph is prose that a reader of this text can follow to its end.

    Args:
        size (int): The size of the thing that is to be made by this function of the module.
        other (`str`, *optional*): What the other thing should be called in all that is printed.

    Example::

        This is = some_code(for_the, reader).of_this[text] and it is not a sentence of prose.

    >>> the_next = "This is a line of a doctest that nobody should read as a sentence of prose."

    ===== ==================== ===============
    This  is a table of things that are short.
    ===== ==================== ===============
    """
    assert paragraphs(embedded.cleandoc(docstring)) == [
        "The first paragraph is prose that a reader of this text can follow to its end."
    ]


def test_a_paragraph_ends_before_its_first_sentence_with_code():
    docstring = (
        "This is a sentence that is as long as it has to be for the rules. Then call f(x, y=2) to see more of it."
    )
    assert paragraphs(docstring) == ["This is a sentence that is as long as it has to be for the rules."]


def test_near_duplicates_are_dropped(tmp_path):
    text = "The {} model is a transformer that was trained on a large corpus of many books and of the web."
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(f'"""{text.format(name.upper())}"""\n')
    assert len(embedded._extract([("source", tmp_path)], None)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_characters": 0}, "max_characters must be at least 1.* got 0"),
        ({"max_characters": 5}, "max_characters=5 is too small for the first paragraph"),
    ],
)
def test_corpus_refuses_sizes_without_a_paragraph(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        embedded_corpus(tmp_path, **arguments)


@pytest.mark.parametrize(
    ("every", "message"),
    [(1, "every must be at least 2.* got 1"), (10**6, "exceeds the number of documents, .*; lower it")],
)
def test_splits_refuse_to_leave_one_side_empty(every, message, documents, cache_dir):
    with pytest.raises(ValueError, match=message):
        embedded_splits(cache_dir, SIZE, every)
