# Licensed under the Apache License, Version 2.0.
"""Sentences with dependency trees: from CoNLL-U files, from spaCy, and built-in ones."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from .files import find_files, read_paragraphs
from .words import Spans, find_words


if TYPE_CHECKING:
    from spacy.language import Language


CONLLU = (".conllu",)


@dataclass(frozen=True)
class Tree:
    """A sentence and its dependency tree.

    Args:
        words (`tuple[str, ...]`): Syntactic words, punctuation included.
        heads (`tuple[int | None, ...]`): Index of the head of each word; `None` for the root.
        relations (`tuple[str, ...]`): Relation of each word to its head, such as `nsubj` or `nsubj:pass`.
        upos (`tuple[str, ...]`): Universal parts of speech; may be empty.
        text (`str`, *optional*): The text that models read; defaults to the words, separated by spaces.
        spans (`tuple[tuple[int, int], ...]`, *optional*): Character span of each word in the text; by default searched
            there. Words of a multiword token, as "de" and "le" in French "du", may have the same span.
        source (`str`): Identifier of the sentence, for messages.

    Raises:
        ValueError: if there are no words, lengths differ, a head is out of range, there is not exactly one root, heads
            have a cycle, or a word is not in the text.

    Example:
        >>> tree = Tree(("Dogs", "bark"), (1, None), ("nsubj", "root"))
        >>> tree.text, tree.spans
        ('Dogs bark', ((0, 4), (5, 9)))
    """

    words: tuple[str, ...]
    heads: tuple[int | None, ...]
    relations: tuple[str, ...]
    upos: tuple[str, ...] = ()
    text: str | None = None
    spans: Spans | None = None
    source: str = ""

    def __post_init__(self):
        source = self.source or "a tree"
        if not self.words:
            raise ValueError(f"{source} has no words.")
        for name in ("heads", "relations", "upos", "spans"):
            values = getattr(self, name)
            is_left_out = not values and name in ("upos", "spans")
            if not is_left_out and len(values) != len(self.words):
                raise ValueError(f"{source} has {len(self.words)} words, but {len(values)} {name}.")
        if fault := _fault(self.heads):
            index, reason = fault
            raise ValueError(f"{source}: word {index}, {self.words[index]!r}, {reason}.")
        if self.text is None:
            object.__setattr__(self, "text", " ".join(self.words))
        if self.spans is None:
            object.__setattr__(self, "spans", find_words(self.words, self.text, source))

    def spaced(self) -> "Tree":
        """The same tree with the words, separated by spaces, as its text.

        Models then read "do n't .", and each word has its own tokens.
        """
        return replace(self, text=None, spans=None)


def _fault(heads: Sequence[int | None]) -> tuple[int, str] | None:
    """Index of the first word at which heads are not a tree, and the reason; `None` for a tree."""
    for index, head in enumerate(heads):
        if head is not None and not 0 <= head < len(heads):
            return index, f"has a head that is not one of the {len(heads)} words"
    roots = [index for index, head in enumerate(heads) if head is None]
    if not roots:
        return 0, "begins a sentence without a root"
    if len(roots) > 1:
        return roots[1], "is a second root"
    for index in range(len(heads)):
        above: int | None = index
        for _ in heads:
            above = None if above is None else heads[above]
        if above is not None:
            return index, "is in a cycle, or depends on a word in a cycle"
    return None


def load_conllu(files: str | Path | Iterable[str | Path]) -> list[Tree]:
    """Loads gold trees from CoNLL-U files (Universal Dependencies, version 2).

    The text consists of the tokens, with spaces unless `SpaceAfter=No`. Words of a multiword token (lines like `3-4`)
    have their own spans if they concatenate to the token, as "do" and "n't", otherwise the span of the whole token.
    Empty nodes (`8.1`), which belong to enhanced trees, are skipped.

    Args:
        files (`str`, `Path` or a list of these): Files, folders or glob patterns; `.conllu` or `.conllu.gz`.

    Returns:
        `list[Tree]`: in the order of the files; `source` is the `sent_id`, or file and line.

    Raises:
        ValueError: if a file is empty, of another type or not in UTF-8; if a line does not have ten columns, or ids
            are not consecutive; or if a sentence is not a tree. The message has file and line.
        FileNotFoundError: if a file is missing or a pattern matches nothing.

    Example:
        >>> import tempfile
        >>> rows = ["1 Dogs _ NOUN _ _ 2 nsubj _ _", "2 bark _ VERB _ _ 0 root _ SpaceAfter=No"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "dogs.conllu")
        ...     _ = path.write_text("\\n".join(rows).replace(" ", "\\t"))
        ...     load_conllu(path)[0].relations
        ('nsubj', 'root')
    """
    trees: list[Tree] = []
    for path in find_files(files, CONLLU):
        found = list(_trees(path))
        if not found:
            raise ValueError(f"files: {path} has no sentences; leave it out.")
        trees += found
    return trees


Row = tuple[str, list[str]]  # file and line, for messages, and columns


def _trees(path: Path) -> Iterator[Tree]:
    for lines in read_paragraphs(path):
        comments = [line for _, line in takewhile(lambda line: line[1].startswith("#"), lines)]
        names = [match[1].strip() for line in comments if (match := re.match(r"#\s*sent_id\s*=\s*(.*)", line))]
        if rows := [(f"{path}, line {number}", line.split("\t")) for number, line in lines[len(comments) :]]:
            yield _tree(rows, names[-1] if names and names[-1] else rows[0][0])


@dataclass
class _Token:
    """A token of the text: one word or, in a multiword token, several."""

    form: str
    stop: int  # index after its last word
    space_after: bool
    where: str


def _tree(rows: list[Row], source: str) -> Tree:
    words: list[Row] = []
    tokens: list[_Token] = []
    for where, columns in rows:
        if len(columns) != 10:
            raise ValueError(f"{where}: {len(columns)} tab-separated columns; CoNLL-U has ten.")
        identifier, form, misc = columns[0], columns[1], columns[9]
        match = re.fullmatch(r"(\d+)(?:-(\d+)|(\.\d+))?", identifier)
        if match is None:
            raise ValueError(
                f"{where}: {identifier!r} is not the id of a word (3), a token (3-4) or an empty node (8.1)."
            )
        if match[3]:
            continue
        stop = int(match[2] or match[1])
        covered = tokens[-1].stop if tokens else 0
        if int(match[1]) != len(words) + 1 or (match[2] and not covered < int(match[1]) < stop):
            raise ValueError(f"{where}: {identifier} is out of order; word {len(words) + 1} is next.")
        if not form:
            raise ValueError(f"{where}: the form is empty.")
        if match[2] or stop > covered:
            tokens.append(_Token(form, stop, "SpaceAfter=No" not in misc.split("|"), where))
        if not match[2]:
            words.append((where, columns))
    if not words:
        raise ValueError(f"{rows[0][0]}: the sentence has no words.")
    if tokens[-1].stop > len(words):
        raise ValueError(f"{tokens[-1].where}: words of the token are missing.")
    heads = [_head(*row) for row in words]
    if fault := _fault(heads):
        where, columns = words[fault[0]]
        raise ValueError(f"{where}: {columns[1]!r} {fault[1]}.")
    forms, upos, relations = (tuple(columns[index] for _, columns in words) for index in (1, 3, 7))
    return Tree(forms, tuple(heads), relations, upos, *_text(tokens, forms), source)


def _head(where: str, columns: list[str]) -> int | None:
    head, relation = columns[6], columns[7]
    if not head.isdecimal():
        raise ValueError(f"{where}: the head {head!r} is not a number; sentences must be annotated.")
    if relation in ("", "_"):
        raise ValueError(f"{where}: {columns[1]!r} has no relation to its head.")
    return int(head) - 1 if int(head) else None


def _text(tokens: list[_Token], words: tuple[str, ...]) -> tuple[str, Spans]:
    text, spans = "", []
    for token in tokens:
        start, inside = len(text), words[len(spans) : token.stop]
        text += token.form
        if "".join(inside) == token.form:
            for word in inside:
                spans.append((start, start + len(word)))
                start += len(word)
        else:
            spans += [(start, len(text))] * len(inside)
        text += " " * token.space_after
    return text.rstrip(), tuple(spans)


def parse_with_spacy(texts: Iterable[str], pipeline: "str | Language" = "en_core_web_sm") -> list[Tree]:
    """Parses texts with a pipeline of spaCy.

    Args:
        texts (iterable of `str`): Texts of any number of sentences.
        pipeline (`str` or `spacy.language.Language`): A pipeline with a parser, or the name of an installed one. It
            determines the relations: English pipelines have `dobj` instead of `obj` in Universal Dependencies.

    Returns:
        `list[Tree]`: a tree for each sentence, with a `source` such as `text 3, sentence 1`.

    Raises:
        ImportError: if spaCy or the pipeline is not installed.
    """
    if isinstance(pipeline, str):
        try:
            import spacy

            pipeline = spacy.load(pipeline)
        except (ImportError, OSError) as error:
            raise ImportError(
                f"parse_with_spacy() needs spaCy and its pipeline {pipeline!r}: pip install spacy, python -m spacy "
                f"download {pipeline}; or read gold trees with load_conllu()."
            ) from error
    trees = []
    for number, document in enumerate(pipeline.pipe(texts), 1):
        for sentence_number, sentence in enumerate(document.sents, 1):
            # Line breaks are tokens in spaCy.
            tokens = [token for token in sentence if not token.is_space]
            if not tokens:
                continue
            indices = {token.i: index for index, token in enumerate(tokens)}
            first = tokens[0].idx
            trees.append(
                Tree(
                    words=tuple(token.text for token in tokens),
                    heads=tuple(None if token.head.i == token.i else indices[token.head.i] for token in tokens),
                    relations=tuple("root" if token.head.i == token.i else token.dep_ for token in tokens),
                    upos=tuple(token.pos_ for token in tokens),
                    text=document.text[first : tokens[-1].idx + len(tokens[-1].text)],
                    spans=tuple((token.idx - first, token.idx - first + len(token.text)) for token in tokens),
                    source=f"text {number}, sentence {sentence_number}",
                )
            )
    return trees


# word/part of speech/head/relation, heads counted from 1
_EMBEDDED = """
The/DET/2/det dog/NOUN/3/nsubj chased/VERB/0/root the/DET/6/det black/ADJ/6/amod cat/NOUN/3/obj ./PUNCT/3/punct
She/PRON/2/nsubj reads/VERB/0/root old/ADJ/4/amod books/NOUN/2/obj in/ADP/7/case the/DET/7/det garden/NOUN/2/obl ./PUNCT/2/punct
My/PRON/2/nmod:poss brother/NOUN/4/nsubj quickly/ADV/4/advmod opened/VERB/0/root the/DET/7/det heavy/ADJ/7/amod door/NOUN/4/obj ./PUNCT/4/punct
The/DET/3/det young/ADJ/3/amod teacher/NOUN/5/nsubj often/ADV/5/advmod sings/VERB/0/root ./PUNCT/5/punct
A/DET/2/det bird/NOUN/3/nsubj sat/VERB/0/root on/ADP/6/case the/DET/6/det roof/NOUN/3/obl of/ADP/9/case the/DET/9/det house/NOUN/6/nmod ./PUNCT/3/punct
We/PRON/3/nsubj never/ADV/3/advmod found/VERB/0/root the/DET/5/det key/NOUN/3/obj ./PUNCT/3/punct
The/DET/2/det letter/NOUN/4/nsubj:pass was/AUX/4/aux:pass written/VERB/0/root by/ADP/7/case a/DET/7/det friend/NOUN/4/obl ./PUNCT/4/punct
Did/AUX/3/aux you/PRON/3/nsubj see/VERB/0/root the/DET/6/det new/ADJ/6/amod film/NOUN/3/obj ?/PUNCT/3/punct
The/DET/2/det children/NOUN/4/nsubj are/AUX/4/aux playing/VERB/0/root outside/ADV/4/advmod ./PUNCT/4/punct
He/PRON/2/nsubj gave/VERB/0/root his/PRON/4/nmod:poss sister/NOUN/2/iobj a/DET/7/det small/ADJ/7/amod present/NOUN/2/obj ./PUNCT/2/punct
The/DET/2/det soup/NOUN/5/nsubj is/AUX/5/cop very/ADV/5/advmod hot/ADJ/0/root ./PUNCT/5/punct
Anna/PROPN/5/nsubj and/CCONJ/3/cc Peter/PROPN/1/conj have/AUX/5/aux bought/VERB/0/root a/DET/7/det boat/NOUN/5/obj ./PUNCT/5/punct
The/DET/2/det man/NOUN/6/nsubj who/PRON/4/nsubj called/VERB/2/acl:relcl us/PRON/4/obj lost/VERB/0/root his/PRON/8/nmod:poss umbrella/NOUN/6/obj ./PUNCT/6/punct
Suddenly/ADV/5/advmod ,/PUNCT/5/punct the/DET/4/det lights/NOUN/5/nsubj went/VERB/0/root out/ADP/5/compound:prt ./PUNCT/5/punct
Tall/ADJ/2/amod trees/NOUN/3/nsubj grow/VERB/0/root slowly/ADV/3/advmod near/ADP/7/case the/DET/7/det river/NOUN/3/obl ./PUNCT/3/punct
I/PRON/2/nsubj think/VERB/0/root that/SCONJ/7/mark the/DET/5/det answer/NOUN/7/nsubj is/AUX/7/cop wrong/ADJ/2/ccomp ./PUNCT/2/punct
The/DET/3/det old/ADJ/3/amod king/NOUN/4/nsubj ruled/VERB/0/root the/DET/6/det land/NOUN/4/obj wisely/ADV/4/advmod ./PUNCT/4/punct
Please/INTJ/2/discourse close/VERB/0/root the/DET/4/det window/NOUN/2/obj ./PUNCT/2/punct
Two/NUM/3/nummod large/ADJ/3/amod ships/NOUN/4/nsubj left/VERB/0/root the/DET/6/det harbour/NOUN/4/obj at/ADP/8/case dawn/NOUN/4/obl ./PUNCT/4/punct
They/PRON/4/nsubj will/AUX/4/aux probably/ADV/4/advmod win/VERB/0/root the/DET/7/det next/ADJ/7/amod game/NOUN/4/obj ./PUNCT/4/punct
The/DET/2/det smell/NOUN/6/nsubj of/ADP/5/case fresh/ADJ/5/amod bread/NOUN/2/nmod filled/VERB/0/root the/DET/8/det room/NOUN/6/obj ./PUNCT/6/punct
Nobody/PRON/2/nsubj knows/VERB/0/root the/DET/5/det real/ADJ/5/amod reason/NOUN/2/obj ./PUNCT/2/punct
When/ADV/4/advmod the/DET/3/det rain/NOUN/4/nsubj stopped/VERB/7/advcl ,/PUNCT/4/punct we/PRON/7/nsubj walked/VERB/0/root home/ADV/7/advmod ./PUNCT/7/punct
The/DET/2/det farmer/NOUN/3/nsubj sells/VERB/0/root sweet/ADJ/5/amod apples/NOUN/3/obj from/ADP/8/case his/PRON/8/nmod:poss orchard/NOUN/3/obl ./PUNCT/3/punct
Her/PRON/2/nmod:poss voice/NOUN/3/nsubj sounded/VERB/0/root strangely/ADV/5/advmod calm/ADJ/3/xcomp ./PUNCT/3/punct
A/DET/3/det strong/ADJ/3/amod wind/NOUN/4/nsubj blew/VERB/0/root the/DET/6/det leaves/NOUN/4/obj across/ADP/9/case the/DET/9/det yard/NOUN/4/obl ./PUNCT/4/punct
The/DET/2/det doctor/NOUN/3/nsubj examined/VERB/0/root the/DET/5/det patient/NOUN/3/obj carefully/ADV/3/advmod ./PUNCT/3/punct
Some/DET/2/det people/NOUN/4/nsubj always/ADV/4/advmod arrive/VERB/0/root late/ADV/4/advmod ./PUNCT/4/punct
The/DET/3/det wooden/ADJ/3/amod bridge/NOUN/7/nsubj over/ADP/6/case the/DET/6/det stream/NOUN/3/nmod collapsed/VERB/0/root ./PUNCT/7/punct
He/PRON/2/nsubj wants/VERB/0/root to/PART/4/mark learn/VERB/2/xcomp a/DET/7/det foreign/ADJ/7/amod language/NOUN/4/obj ./PUNCT/2/punct
"""  # noqa: E501 (one sentence per line)


def embedded_trees() -> list[Tree]:
    """Thirty built-in English sentences with trees in Universal Dependencies.

    Returns:
        `list[Tree]`

    Example:
        >>> tree = embedded_trees()[0]
        >>> tree.text
        'The dog chased the black cat.'
        >>> tree.words[tree.heads[1]], tree.relations[1]
        ('chased', 'nsubj')
    """
    trees = []
    for number, line in enumerate(_EMBEDDED.strip().split("\n"), 1):
        words, upos, heads, relations = zip(*(word.split("/") for word in line.split()))
        text = "".join(word if tag == "PUNCT" else f" {word}" for word, tag in zip(words, upos)).strip()
        indices = tuple(int(head) - 1 if head != "0" else None for head in heads)
        trees.append(Tree(words, indices, relations, upos, text, source=f"embedded sentence {number}"))
    return trees
