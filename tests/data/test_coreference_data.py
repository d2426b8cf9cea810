# Licensed under the Apache License, Version 2.0.
import gzip

import pytest
from transformers import AutoTokenizer

from hf_attn_dynamics.data import (
    CoreferenceItem,
    Mention,
    add_distractors,
    embedded_coreference,
    encode_words,
    load_conll2012,
    load_coreference,
    load_open_sesame,
    load_winobias,
    load_winogender,
    single_token_items,
    train_byte_level_bpe,
    train_marian_tokenizer,
)
from hf_attn_dynamics.data.coreference import DISTRACTORS


KING = CoreferenceItem(("the", "king", "hurt", "himself"), Mention(3, 4, 3), (Mention(0, 2, 1),))


def said(item, mention):
    return " ".join(item.words[mention.start : mention.stop])


def read(item):
    """Mention, antecedents, distractors and group, as words."""
    sides = ([said(item, one) for one in side] for side in (item.antecedents, item.distractors))
    return said(item, item.mention), *sides, item.group


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mention": Mention(3, 5, 3)}, "Mention.start=3, stop=5, head=3. does not fit a text of 4 words"),
        ({"mention": Mention(2, 3, 3)}, "does not fit"),
        ({"antecedents": ()}, "the mention at word 3 has no antecedent"),
        ({"antecedents": (Mention(0, 4, 3),)}, "the head of the antecedent .* is within"),
        ({"text": "the queen hurt himself"}, "'king' does not follow the preceding words in 'the queen hurt himself'"),
    ],
)
def test_items_that_cannot_be_are_refused(changes, message):
    values = {"words": KING.words, "mention": KING.mention, "antecedents": KING.antecedents, **changes}
    with pytest.raises(ValueError, match=message):
        CoreferenceItem(**values)


# ---- Tokens ---------------------------------------------------------------------------------------------------------


def tokenizers(folder):
    texts = ["The king, hurt himself."] * 4 + [item.text for item in embedded_coreference()]
    yield train_byte_level_bpe(texts, 300, kind="roberta")
    yield train_byte_level_bpe(texts, 400, kind="bert")
    pytest.importorskip("sentencepiece")
    yield train_marian_tokenizer(texts, texts, 80, folder)


def test_the_tokens_of_a_word_spell_it(tmp_path):
    for tokenizer in tokenizers(tmp_path):
        for item in embedded_coreference():
            ids, words = encode_words(item, tokenizer)
            assert [token for token, word in zip(ids, words) if word is None] == tokenizer("")["input_ids"]
            for position, word in enumerate(item.words):
                pieces = [token for token, of in zip(ids, words) if of == position]
                assert tokenizer.decode(pieces).strip() == word
            if tokenizer.is_fast:
                assert ids == tokenizer(item.text)["input_ids"]


def test_sentences_with_one_token_a_word_are_kept():
    tokenizer = train_byte_level_bpe(["the king hurt himself", " the king hurt himself"] * 3, 320)
    other = CoreferenceItem(("the", "queen", "hurt", "herself"), KING.mention, KING.antecedents)
    assert single_token_items([other, KING], tokenizer) == [KING]


# ---- Distractors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", ["before", "after"])
def test_a_distractor_moves_no_mention_to_other_words(position):
    item = CoreferenceItem(KING.words, KING.mention, KING.antecedents, (Mention(2, 3, 2),), "reflexive", "somewhere")
    longer = add_distractors([item], position)[0]
    clause = next(clause for clause in DISTRACTORS if clause in longer.text)
    whole = [clause, "and", item.text] if position == "before" else [item.text, "and", clause]
    assert longer.text == " ".join(longer.words) == " ".join(whole)
    subject = " ".join(clause.split()[:2])
    assert read(longer) == ("himself", ["the king"], [subject, "hurt"], "reflexive")


def test_distractors_depend_on_text_and_seed_alone():
    items = [CoreferenceItem((f"w{n}", "x", "y"), Mention(2, 3, 2), (Mention(0, 1, 0),)) for n in range(30)]
    texts = [item.text for item in add_distractors(items)]
    assert [item.text for item in add_distractors(items[::-1])] == texts[::-1]
    assert [item.text for item in add_distractors(items, seed=1)] != texts
    with pytest.raises(ValueError, match="position must be 'before' or 'after', got 'between'"):
        add_distractors(items, "between")


# ---- Open Sesame ----------------------------------------------------------------------------------------------------


def test_open_sesame_is_read(tmp_path):
    lines = [
        "our prince will love himself\t4\t0 1\t",
        "the man that will hit the niece would kick some wife by himself\t12\t0 1\t5 6 9 10 ",
        "the king himself slept\t2\t0 1\t",
    ]
    (tmp_path / "refl.0.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    (tmp_path / "refl.0.pos.gz").write_bytes(gzip.compress(b"DT NN"))
    items = load_open_sesame(tmp_path)
    # The last one would be right for a head that looks one word back.
    assert [read(item) for item in items] == [
        ("himself", ["our prince"], [], "reflexive"),
        ("himself", ["the man"], ["the niece", "some wife"], "reflexive"),
    ]
    assert items[1].source.endswith("line 2")
    assert load_coreference("open_sesame", tmp_path / "refl.0.gz") == items


@pytest.mark.parametrize("line", ["no tabs at all", "the king hurt himself\tlast\t0 1", "the king hurt himself\t3"])
def test_a_broken_line_of_open_sesame_is_named(tmp_path, line):
    (tmp_path / "refl.0").write_text(f"the king hurt himself\t3\t0 1\n{line}\n")
    with pytest.raises(ValueError, match=r"refl\.0, line 2"):
        load_open_sesame(tmp_path)


# ---- WinoBias -------------------------------------------------------------------------------------------------------


def test_winobias_is_read(tmp_path):
    file = tmp_path / "pro_stereotyped_type1.txt.dev"
    file.write_text(
        "1 [The developer] met the head chef because [she] liked [her] dishes.\n"
        "2 The developer met [the head chef], and didn't thank [him].\n"
    )
    first, second, third = load_winobias(tmp_path)
    assert read(first) == ("she", ["The developer"], ["the head chef"], "pro type 1")
    assert read(second) == ("her", ["The developer", "she"], ["the head chef"], "pro type 1")
    assert read(third) == ("him", ["the head chef"], ["The developer"], "pro type 1")
    assert third.words[-6:] == (",", "and", "didn't", "thank", "him", ".")
    assert third.text == "The developer met the head chef, and didn't thank him."
    assert third.antecedents[0].head == 5


def test_the_longest_name_is_the_distractor(tmp_path):
    file = tmp_path / "pro_stereotyped_type1.txt.dev"
    file.write_text(
        "1 [The king] slept because [he] was tired.\n2 [The king of Spain] slept because [he] was tired.\n"
        "3 [The cook] met the king of Spain because [she] was invited.\n"
    )
    assert read(load_winobias(tmp_path)[2])[2] == ["the king of Spain"]


@pytest.mark.parametrize(
    "line",
    ["No brackets.", "[The cook] slept.", "[The cook] said [he slept.", "[A cook] [he] x]", "[ ] said [he] slept."],
)
def test_a_broken_line_of_winobias_is_named(tmp_path, line):
    file = tmp_path / "mine.txt"
    file.write_text(f"1 [The cook] said [he] slept.\n\n{line}\n")
    with pytest.raises(ValueError, match=r"mine\.txt, line 3: .* needs an antecedent and a pronoun"):
        load_winobias(file)


def test_embedded_sentences_have_a_distractor_nearly_always():
    items = embedded_coreference()
    assert len(items) == 20
    assert sum(bool(item.distractors) for item in items) >= 15


# ---- Winogender -----------------------------------------------------------------------------------------------------

HEADER = "occupation(0)\tother-participant(1)\tanswer\tsentence\n"


def test_winogender_is_filled_in(tmp_path):
    (tmp_path / "templates.tsv").write_text(
        f"{HEADER}clerk\tguest\t1\tThe $PARTICIPANT asked the $OCCUPATION if $NOM_PRONOUN was late.\n"
        "baker\tclient\t0\tA $OCCUPATION saw a $PARTICIPANT near $POSS_PRONOUN shop.\n"
    )
    items = load_winogender(tmp_path)
    assert [item.text for item in items] == [
        "The guest asked the clerk if he was late.",
        "The guest asked the clerk if she was late.",
        "The guest asked the clerk if they were late.",
        "Someone asked the clerk if he was late.",
        "Someone asked the clerk if she was late.",
        "Someone asked the clerk if they were late.",
        "A baker saw a client near his shop.",
        "A baker saw a client near her shop.",
        "A baker saw a client near their shop.",
        "A baker saw someone near his shop.",
        "A baker saw someone near her shop.",
        "A baker saw someone near their shop.",
    ]
    assert read(items[0]) == ("he", ["The guest"], ["the clerk"], "male")
    assert read(items[5]) == ("they", ["Someone"], ["the clerk"], "neutral")
    assert read(items[10]) == ("her", ["A baker"], ["someone"], "female")


@pytest.mark.parametrize(
    "row",
    [
        "clerk\tguest\t2\tThe $PARTICIPANT met the $OCCUPATION and $NOM_PRONOUN left.",
        "clerk\tguest\t1\tThe $OCCUPATION left when $NOM_PRONOUN slept.",
        "clerk\tguest\t1\tThe $PARTICIPANT met the $OCCUPATION.",
        "clerk\tguest\t1\tThe $PARTICIPANT met the $OCCUPATION and $REFLEXIVE left.",
        "clerk\t \t1\tThe $PARTICIPANT met the $OCCUPATION and $NOM_PRONOUN left.",
        "\tguest\t1\tThe $PARTICIPANT met the $OCCUPATION and $NOM_PRONOUN left.",
    ],
)
def test_a_broken_template_is_named(tmp_path, row):
    (tmp_path / "templates.tsv").write_text(f"{HEADER}{row}\n")
    with pytest.raises(ValueError, match=r"templates\.tsv, line 2: the (template|occupation)"):
        load_winogender(tmp_path)


# ---- CoNLL-2012 -----------------------------------------------------------------------------------------------------


def conll(*sentences, document="(nw/x/00/x_0001)", part="000"):
    """A document of sentences like `The/DT/(0 king/NN/0) ran/VBD/-`."""
    lines = [f"#begin document {document}; part {part}"]
    for sentence in sentences:
        for number, word in enumerate(sentence.split()):
            form, tag, chain = word.split("/")
            lines.append(f"nw/x/00/x_0001   0   {number}   {form}   {tag}   *   -   -   -   -   *   {chain}")
        lines.append("")
    return "\n".join([*lines, "#end document", ""])


TWO_DOCUMENTS = conll(
    # [the chief of [the bank]1]0 said [[his]0 wife]2 left [Ann Lee]3
    "The/DT/(0 chief/NN/- of/IN/- the/DT/(1 bank/NN/0)|1) said/VBD/- his/PRP$/(2|(0) wife/NN/2) met/VBD/- "
    "Ann/NNP/(3 Lee/NNP/3) ././-",
    "She/PRP/(2) told/VBD/- Lee/NNP/(3) that/IN/- "
    "the/DT/(1 bank/NN/- which/WDT/- failed/VBD/1) was/VBD/- his/PRP$/(0)",
) + conll("He/PRP/(0) slept/VBD/- ././-", "He/PRP/(0) woke/VBD/-", document="(nw/x/00/x_0002)")


def test_conll_is_read(tmp_path):
    folder = tmp_path / "data" / "nw"
    folder.mkdir(parents=True)
    (folder / "x.v4_gold_conll").write_text(TWO_DOCUMENTS)
    items = load_conll2012(tmp_path)
    first, second = ["The chief of the bank", "the bank", "his", "his wife", "Ann Lee"], ["She", "Lee"]
    others = [[name for name in first if name not in left] for left in ({"his wife"}, {"Ann Lee"}, {"the bank"})]
    assert [read(item) for item in items] == [
        ("his", ["The chief of the bank"], ["the bank"], "pronominal"),
        ("She", ["his wife"], others[0], "pronominal"),
        ("Lee", ["Ann Lee"], [*others[1], "She"], "proper"),
        ("the bank which failed", ["the bank"], [*others[2], *second], "nominal"),
        ("his", [first[0], "his"], ["the bank", *first[3:], *second, "the bank which failed"], "pronominal"),
        ("He", ["He"], [], "pronominal"),
    ]
    heads = [item.words[mention.head] for item in items[:4] for mention in (item.mention, *item.antecedents)]
    assert heads == ["his", "chief", "She", "wife", "Lee", "Lee", "bank", "bank"]
    assert items[0].text == items[4].text
    # Chains of one document are not those of the next.
    assert items[-1].words == ("He", "slept", ".", "He", "woke")


def test_windows_of_conll_have_whole_sentences(tmp_path):
    file = tmp_path / "x_conll"
    file.write_text(conll(*["He/PRP/(0) saw/VBD/- him/PRP/(0)"] * 3))
    assert [len(item.words) for item in load_conll2012(file, max_words=9)] == [9] * 5
    assert [len(item.words) for item in load_conll2012(file, max_words=8)] == [6, 6, 6, 3]
    assert [len(item.words) for item in load_conll2012(file, max_words=1)] == [3, 3, 3]
    with pytest.raises(ValueError, match="max_words must be at least 1, got 0"):
        load_conll2012(file, max_words=0)


@pytest.mark.parametrize(
    ("tagged", "head"),
    [
        ("The/DT new/JJ chief/NN", "chief"),
        ("the/DT company/NN 's/POS chief/NN", "chief"),
        ("John/NNP Smith/NNP ,/, the/DT chief/NN", "Smith"),
        ("all/DT of/IN the/DT men/NNS in/IN town/NN", "men"),
        ("the/DT man/NN wearing/VBG a/DT hat/NN", "man"),
        ("the/DT winning/VBG team/NN", "team"),
        ("its/PRP$ parent/NN", "parent"),
        ("the/DT bank/NN 's/POS", "bank"),
        ("all/DT this/DT", "this"),
    ],
)
def test_the_head_is_the_last_noun_before_what_follows_it(tmp_path, tagged, head):
    words = [f"{word}/-" for word in tagged.split()]
    words[0] = words[0][:-1] + "(5"
    words[-1] = words[-1][:-1] + ("5)" if len(words) > 1 else "(5)")
    (tmp_path / "x_conll").write_text(conll(" ".join([*words, "saw/VBD/-", "it/PRP/(5)"])))
    (item,) = load_conll2012(tmp_path)
    assert item.words[item.antecedents[0].head] == head


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b 0 He PRP * -\n", "line 1: word outside of a document"),
        ("#begin document (x); part 000\na 0 0 He (0)\n#end document\n", "line 2: 5 columns"),
        (conll("He/PRP/0)"), r"line 2: 0\) closes a mention that was not opened in this sentence"),
        (conll("He/PRP/(0 ran/VBD/-"), r"line 2: \(0 opens a mention that is not closed"),
        (conll("He/PRP/(0) ran/VBD/zero"), r"line 3: coreference 'zero' must be \(12"),
        (conll("[WORD]/PRP/(0)"), "line 2: the file has no words"),
        (conll("He/PRP/(0)") + "#end document\n", "line 5: '#end document' without '#begin document'"),
        (conll("He/PRP/(0)").replace("#end document\n", ""), "x_conll ends within a document"),
        (
            conll("He/PRP/(0)").replace("#end document\n", "") + conll("He/PRP/-"),
            "line 4: '#end document' of the previous document is missing",
        ),
    ],
    ids=["outside", "columns", "close", "open", "bracket", "skeleton", "end", "cut", "begin"],
)
def test_a_broken_file_of_conll_is_named(tmp_path, text, message):
    (tmp_path / "x_conll").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_conll2012(tmp_path)


# ---- Files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["open_sesame", "winobias", "winogender", "conll2012"])
def test_files_that_are_missing_or_empty_are_refused(tmp_path, kind):
    with pytest.raises(FileNotFoundError, match="neither a file nor a folder with"):
        load_coreference(kind, tmp_path)
    if kind in ("open_sesame", "winobias"):
        (tmp_path / "empty").write_text("\n")
        with pytest.raises(ValueError, match="is empty"):
            load_coreference(kind, tmp_path / "empty")


def test_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be one of open_sesame, winobias, winogender, conll2012, got 'gap'"):
        load_coreference("gap", tmp_path)


def test_real_files_are_read(real_data):
    assert len(load_open_sesame(real_data / "open-sesame" / "refl.0.gz")) == 10_000
    winobias = load_winobias(real_data / "winobias")
    assert len({(item.source, item.text) for item in winobias}) == 3168
    assert len(winobias) == 3255
    pronouns = {"he", "she", "him", "her", "his", "himself", "herself"}
    assert all(said(item, item.mention) in pronouns and item.distractors for item in winobias)


def test_real_templates_give_the_published_sentences(real_data):
    folder = real_data / "winogender"
    published = [line.split("\t")[1] for line in (folder / "all_sentences.tsv").read_text().splitlines()[1:]]
    assert sorted(item.text for item in load_winogender(folder)) == sorted(published)


def test_real_tokenizers_give_words_their_tokens(real_data, real_models):
    tokenizer = AutoTokenizer.from_pretrained(real_models / "minilm")
    items = load_open_sesame(real_data / "open-sesame" / "refl.0.gz")[:50]
    assert single_token_items(items, tokenizer) == items
