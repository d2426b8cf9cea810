# Licensed under the Apache License, Version 2.0.
"""Coreference datasets: mentions with their antecedents."""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from .files import read_lines
from .tables import open_table
from .words import Spans, encode_words, find_words


class Mention(NamedTuple):
    """Word indices of a mention: `start` to `stop - 1`, and its `head`."""

    start: int
    stop: int
    head: int

    def shifted(self, by: int) -> "Mention":
        """The mention after `by` words have been inserted before it."""
        return Mention(*(index + by for index in self))


@dataclass(frozen=True)
class CoreferenceItem:
    """A mention and its antecedents.

    Args:
        words (`tuple[str, ...]`): All words of the text, punctuation included.
        mention ([`Mention`]): The mention.
        antecedents (`tuple[Mention, ...]`): Coreferent mentions that count as correct.
        distractors (`tuple[Mention, ...]`): Known mentions of other entities.
        group (`str`): Group for separate scores, such as the type of the mention.
        source (`str`): Origin of the item, for messages.
        text (`str`, *optional*): The text that models read; defaults to the words, separated by spaces.

    Raises:
        ValueError: if a mention or its head is out of range, there is no antecedent, the mention contains the head of
            one, or a word is not in the text.

    Example:
        >>> item = CoreferenceItem(("the", "king", "hurt", "himself"), Mention(3, 4, 3), (Mention(0, 2, 1),))
        >>> item.text
        'the king hurt himself'
        >>> item.spans
        ((0, 3), (4, 8), (9, 13), (14, 21))
    """

    words: tuple[str, ...]
    mention: Mention
    antecedents: tuple[Mention, ...]
    distractors: tuple[Mention, ...] = ()
    group: str = ""
    source: str = ""
    text: str | None = None

    def __post_init__(self):
        where = self.source or "a coreference item"
        for mention in (self.mention, *self.antecedents, *self.distractors):
            if not 0 <= mention.start <= mention.head < mention.stop <= len(self.words):
                raise ValueError(f"{where}: {mention} does not fit a text of {len(self.words)} words.")
        if not self.antecedents:
            raise ValueError(f"{where}: the mention at word {self.mention.start} has no antecedent.")
        for antecedent in self.antecedents:
            if self.mention.start <= antecedent.head < self.mention.stop:
                raise ValueError(f"{where}: the head of the antecedent {antecedent} is within the {self.mention}.")
        if self.text is None:
            object.__setattr__(self, "text", " ".join(self.words))
        self.spans  # noqa: B018 (raises ValueError for words that are not in the text)

    @property
    def spans(self) -> Spans:
        """Character span of each word in the text."""
        return find_words(self.words, self.text, self.source or "a coreference item")


def single_token_items(items: Iterable[CoreferenceItem], tokenizer: PreTrainedTokenizerBase) -> list[CoreferenceItem]:
    """Selects the items in which every word is a single token, as Lin et al. (2019) do.

    Args:
        items (iterable of [`CoreferenceItem`]): The items.
        tokenizer ([`PreTrainedTokenizerBase`]): The tokenizer.

    Returns:
        `list[CoreferenceItem]`: the selected items, in order.
    """
    kept = []
    for item in items:
        ids, words = encode_words(item, tokenizer)
        pieces = [(token, word) for token, word in zip(ids, words) if word is not None]
        one_each = [word for _, word in pieces] == list(range(len(item.words)))
        if one_each and all(token != tokenizer.unk_token_id for token, _ in pieces):
            kept.append(item)
    return kept


# Plural subjects, to which neither "himself" nor "herself" can refer.
DISTRACTORS = (
    "the people were happy",
    "the children were tired",
    "the students were quiet",
    "the teachers were late",
    "the doctors were busy",
    "the workers were hungry",
    "the players were ready",
    "the women were angry",
    "the men were cold",
)
POSITIONS = ("before", "after")


def add_distractors(
    items: Iterable[CoreferenceItem], position: str = "before", seed: int = 0
) -> list[CoreferenceItem]:
    """Adds a clause with a distractor to each item, for texts without punctuation (Lin et al. 2019).

    Args:
        items (iterable of [`CoreferenceItem`]): The items.
        position (`str`): Position of the clause, joined by "and": `"before"` the text, or `"after"` it, as in
            Deshpande & Narasimhan (2020, section 5.6).
        seed (`int`): Seed of the random clause of each item, which does not depend on other items.

    Returns:
        `list[CoreferenceItem]`: items with the extended texts.

    Raises:
        ValueError: if the position is unknown.

    Example:
        >>> item = CoreferenceItem(("the", "king", "hurt", "himself"), Mention(3, 4, 3), (Mention(0, 2, 1),))
        >>> longer = add_distractors([item])[0]
        >>> longer.text
        'the players were ready and the king hurt himself'
        >>> longer.mention, longer.distractors
        (Mention(start=8, stop=9, head=8), (Mention(start=0, stop=2, head=1),))
    """
    if position not in POSITIONS:
        raise ValueError(f"position must be {' or '.join(map(repr, POSITIONS))}, got {position!r}.")
    longer = []
    for item in items:
        clause = random.Random(f"{seed}-{item.text}").choice(DISTRACTORS)
        added = tuple(clause.split())
        if position == "after":
            begin = len(item.words) + 1
            words, text, shift = (*item.words, "and", *added), f"{item.text} and {clause}", 0
        else:
            begin = 0
            words, text, shift = (*added, "and", *item.words), f"{clause} and {item.text}", len(added) + 1
        longer.append(
            replace(
                item,
                words=words,
                text=text,
                mention=item.mention.shifted(shift),
                antecedents=tuple(one.shifted(shift) for one in item.antecedents),
                distractors=(Mention(begin, begin + 2, begin + 1), *(one.shifted(shift) for one in item.distractors)),
            )
        )
    return longer


def load_coreference(kind: str, path: str | Path) -> list[CoreferenceItem]:
    """Loads a supported coreference dataset.

    Args:
        kind (`str`): `"open_sesame"`, `"winobias"`, `"winogender"` or `"conll2012"`.
        path (`str` or `Path`): The file or folder, see the function `load_…` of that name.

    Returns:
        `list[CoreferenceItem]`

    Raises:
        ValueError: if the kind is unknown, or a file has the wrong format; the message names file and line.
        FileNotFoundError: if there is no such file, or the folder has none.
    """
    if kind not in READERS:
        raise ValueError(f"the kind of coreference data must be one of {', '.join(READERS)}, got {kind!r}.")
    return READERS[kind](path)


def load_open_sesame(path: str | Path) -> list[CoreferenceItem]:
    """Loads reflexive pronouns in the synthetic sentences of Lin et al. (2019): `refl.0`, `refl.1` and `refl.5`.

    A line has tab-separated columns: the sentence, the word index of the reflexive pronoun, the indices of its
    antecedent, and optionally those of other noun phrases. Consecutive words are one mention, whose head is the last
    word. Lines whose antecedent directly precedes the pronoun are skipped: previous-token heads would be correct.

    Args:
        path (`str` or `Path`): A file, also `.gz`, or the folder with `refl.*`.

    Returns:
        `list[CoreferenceItem]`: items of the group `reflexive`.

    Raises:
        ValueError: if a line has another format.
        FileNotFoundError: if there is no such file.
    """
    items = []
    for file in _files(path, "refl.*", lambda name: ".pos" not in name):
        for source, line in _lines(file):
            cells = line.split("\t")
            try:
                words = tuple(cells[0].split())
                mention = int(cells[1])
                antecedents, others = (_runs(cells[i].split() if len(cells) > i else []) for i in (2, 3))
            except (IndexError, ValueError) as error:
                raise ValueError(
                    f"{source}: {line!r} must have a sentence, the index of its reflexive pronoun and the indices of "
                    "its antecedent, separated by tabs."
                ) from error
            if antecedents and antecedents[-1].stop == mention:
                continue
            item = _item(source, words, Mention(mention, mention + 1, mention), antecedents, others, "reflexive")
            items.append(item)
    return items


def load_winobias(path: str | Path) -> list[CoreferenceItem]:
    """Loads WinoBias (Zhao et al. 2018), whose occupations and pronouns are in square brackets.

    All bracketed mentions of a line are coreferent. Each pronoun is an item, with the preceding bracketed mentions as
    antecedents; 3,168 lines give 3,255 items. Distractors are the other occupations of the sentence, which are
    bracketed elsewhere in the file. The head is the last word.

    Args:
        path (`str` or `Path`): A file, or the folder with `*_stereotyped_type*.txt.*`.

    Returns:
        `list[CoreferenceItem]`: items of the groups `pro type 1` and so on, by file name, or `pronominal`.

    Raises:
        ValueError: if a line has fewer than two brackets, or an unclosed one.
        FileNotFoundError: if there is no such file.
    """
    items = []
    for file in _files(path, "*_stereotyped_type*.txt.*"):
        named = re.match(r"(pro|anti)_stereotyped_type(\d)", file.name)
        group = f"{named[1]} type {named[2]}" if named else "pronominal"
        # Lines start with a number.
        items += _bracketed([(source, re.sub(r"^\d+\s+", "", line)) for source, line in _lines(file)], group)
    return items


def load_winogender(path: str | Path) -> list[CoreferenceItem]:
    """Loads the 720 sentences of Winogender (Rudinger et al. 2018) from their 120 templates.

    Each template gives six sentences: with the participant or "someone", and with male, female and neutral pronouns.
    The other person is the distractor. After "they", "was" becomes "were", as in the published `all_sentences.tsv`.

    Args:
        path (`str` or `Path`): `templates.tsv`, or its folder.

    Returns:
        `list[CoreferenceItem]`: items of the groups `male`, `female` and `neutral`.

    Raises:
        ValueError: if a template has another format.
        FileNotFoundError: if there is no such file.
    """
    items = []
    for file in _files(path, "templates.tsv"):
        table = open_table(file)
        columns = ("occupation(0)", "other-participant(1)", "answer", "sentence")
        rows = zip(*(table.cells("column", column) for column in columns), strict=True)
        for number, (occupation, participant, answer, template) in enumerate(rows, 2):
            source = f"{file}, line {number}"
            slots = re.findall(r"\$\w+", template)
            pronouns = [slot for slot in slots if slot in PRONOUN_SLOTS]
            if answer not in ("0", "1") or len(pronouns) != 1 or sorted({*slots} - {*pronouns}) != PERSON_SLOTS:
                raise ValueError(
                    f"{source}: the template {template!r} with the answer {answer!r} needs {', '.join(PERSON_SLOTS)}, "
                    f"one of {', '.join(PRONOUN_SLOTS)}, and the answer 0 or 1."
                )
            if not occupation.strip() or not participant.strip():
                raise ValueError(f"{source}: the occupation {occupation!r} or participant {participant!r} is blank.")
            for person in (participant, "someone"):
                for group, forms in PRONOUNS.items():
                    filled = {
                        "$OCCUPATION": occupation,
                        "$PARTICIPANT": person,
                        pronouns[0]: forms[PRONOUN_SLOTS.index(pronouns[0])],
                    }
                    name = f"{source} ({person}, {group})"
                    items.append(_filled(name, template, filled, pronouns[0], PERSON_SLOTS[int(answer)], group))
    return items


PERSON_SLOTS = ["$OCCUPATION", "$PARTICIPANT"]  # in the order of the answers 0 and 1
PRONOUN_SLOTS = ("$NOM_PRONOUN", "$POSS_PRONOUN", "$ACC_PRONOUN")
PRONOUNS = {"male": ("he", "his", "him"), "female": ("she", "her", "her"), "neutral": ("they", "their", "them")}


def load_conll2012(path: str | Path, max_words: int = 256) -> list[CoreferenceItem]:
    """Loads mentions of the CoNLL-2012 shared task (Pradhan et al. 2012), as probed by Clark et al. (2019).

    Documents are divided into windows of whole sentences with at most `max_words` words, or of one longer sentence.
    Each mention with an earlier mention of its chain in the same window is an item: earlier mentions of the chain are
    its antecedents, and those of other chains its distractors. A mention is earlier if its head precedes the first
    word of the other. Mentions without coreference are not annotated, and thus never distractors.

    The head is the last noun or personal pronoun before the first preposition, "to", relative pronoun, verb, comma,
    colon or bracket that follows a noun or personal pronoun; or the last word of a mention without either. The tag of
    the head determines the group: PRP and PRP$ are `pronominal`, NNP and NNPS `proper`, and all others `nominal`.

    Args:
        path (`str` or `Path`): A file, or a folder with `*_conll` (`*_gold_conll`, `*_auto_conll`) at any depth:
            tables with space-separated columns document, part, number, word, tag, …, coreference.
        max_words (`int`): Largest number of words of a window.

    Returns:
        `list[CoreferenceItem]`

    Raises:
        ValueError: if a file has another format, or contains no words (`*_skel`); the message names file and line.
        FileNotFoundError: if there is no such file.
    """
    if max_words < 1:
        raise ValueError(f"max_words must be at least 1, got {max_words}.")
    return [
        item
        for file in _files(path, "**/*_conll")
        for sentences in _documents(file)
        for window in _windows(sentences, max_words)
        for item in _items_of_window(window)
    ]


READERS: dict[str, Callable[[str | Path], list[CoreferenceItem]]] = {
    "open_sesame": load_open_sesame,
    "winobias": load_winobias,
    "winogender": load_winogender,
    "conll2012": load_conll2012,
}


def _files(path: str | Path, pattern: str, wanted: Callable[[str], bool] = lambda name: True) -> list[Path]:
    path = Path(path)
    if path.is_file():
        return [path]
    found = sorted(file for file in path.glob(pattern) if file.is_file() and wanted(file.name))
    if not found:
        raise FileNotFoundError(f"{path} is neither a file nor a folder with {pattern}.")
    return found


def _lines(file: Path) -> list[tuple[str, str]]:
    """Lines that are not blank, with file and line number."""
    lines = [(f"{file}, line {number}", line) for number, line in enumerate(read_lines(file), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{file} is empty; leave it out.")
    return lines


def _item(
    source: str,
    words: Iterable[str],
    mention: Mention,
    antecedents: Iterable[Mention],
    distractors: Iterable[Mention],
    group: str,
    text: str | None = None,
) -> CoreferenceItem:
    return CoreferenceItem(tuple(words), mention, tuple(antecedents), tuple(distractors), group, source, text)


def _runs(indices: Sequence[str]) -> list[Mention]:
    """Groups consecutive word indices into mentions, whose head is the last word."""
    runs: list[list[int]] = []
    for index in map(int, indices):
        if runs and runs[-1][-1] + 1 == index:
            runs[-1].append(index)
        else:
            runs.append([index])
    return [Mention(run[0], run[-1] + 1, run[-1]) for run in runs]


_WORD = re.compile(r"\w+(?:[-'’]\w+)*|[^\w\s]")


def _mention(words: list[re.Match], start: int, end: int) -> Mention:
    """The mention of the words that overlap with a character span."""
    inside = [index for index, word in enumerate(words) if word.start() < end and word.end() > start]
    return Mention(inside[0], inside[-1] + 1, inside[-1])


def _bracketed(lines: Iterable[tuple[str, str]], group: str) -> list[CoreferenceItem]:
    parsed, entities = [], set()
    for source, line in lines:
        parts = re.split(r"\[([^][]+)\]", line)
        is_named = all(_WORD.search(part) for part in parts[1::2])
        if len(parts) < 5 or not is_named or any(mark in part for part in parts for mark in "[]"):
            raise ValueError(f"{source}: {line!r} needs an antecedent and a pronoun in square brackets.")
        spans, begin = [], 0
        for number, part in enumerate(parts):
            if number % 2:
                spans.append((begin, begin + len(part)))
            begin += len(part)
        parsed.append((source, "".join(parts), spans))
        entities.add(_without_article(parts[1]))
    # Longer names first: "king of Spain" before "king".
    names = "|".join(map(re.escape, sorted(entities, key=lambda name: (-len(name), name))))
    pattern = re.compile(rf"\b(?:(?:the|an?) )?({names})\b", re.IGNORECASE)
    items = []
    for source, text, spans in parsed:
        words = list(_WORD.finditer(text))
        mentions = [_mention(words, *span) for span in spans]
        others = [
            _mention(words, *match.span())
            for match in pattern.finditer(text)
            if all(match.end() <= start or match.start() >= end for start, end in spans)
        ]
        for number, mention in enumerate(mentions[1:], 1):
            items.append(_item(source, [w[0] for w in words], mention, mentions[:number], others, group, text))
    return items


def _without_article(phrase: str) -> str:
    return re.sub(r"^(?:the|an?) ", "", phrase.strip().lower())


def _filled(
    source: str, template: str, filled: dict[str, str], pronoun: str, right: str, group: str
) -> CoreferenceItem:
    """Fills in one sentence of a template."""
    if filled["$PARTICIPANT"] == "someone":
        template = re.sub(r"\b(?:the|an?) (?=\$PARTICIPANT)", "", template, flags=re.IGNORECASE)
    if filled[pronoun] == "they":
        template = template.replace(f"{pronoun} was ", f"{pronoun} were ")
    text, spans = "", {}
    for part in re.split(r"(\$\w+)", template):
        if part in filled:
            word = filled[part] if text else filled[part].capitalize()
            spans[part] = len(text), len(text) + len(word)
            text += word
        else:
            text += part
    words = list(_WORD.finditer(text))
    mentions = {slot: _mention(words, *span) for slot, span in spans.items()}
    for slot in PERSON_SLOTS:
        # The article is part of the mention.
        start, stop, head = mentions[slot]
        if start and words[start - 1][0].lower() in ("the", "a", "an"):
            mentions[slot] = Mention(start - 1, stop, head)
    wrong = next(slot for slot in PERSON_SLOTS if slot != right)
    words = [word[0] for word in words]
    return _item(source, words, mentions[pronoun], [mentions[right]], [mentions[wrong]], group, text)


@dataclass
class _Sentence:
    source: str
    words: list[str]
    tags: list[str]
    mentions: list[tuple[int, int, int]]  # chain, first word, word after the last


def _documents(file: Path) -> Iterator[list[_Sentence]]:
    """Yields the sentences of each document part, within which chains are numbered."""
    sentences: list[_Sentence] | None = None
    rows: list[tuple[str, list[str]]] = []
    for number, line in enumerate([*read_lines(file), ""], 1):
        source = f"{file}, line {number}"
        line = line.strip()
        if line and not line.startswith("#"):
            if sentences is None:
                raise ValueError(f"{source}: word outside of a document; '#begin document' is missing.")
            rows.append((source, line.split()))
            continue
        if rows:
            sentences.append(_sentence(rows))
            rows = []
        if line.startswith("#begin document"):
            if sentences is not None:
                raise ValueError(f"{source}: '#end document' of the previous document is missing.")
            sentences = []
        elif line.startswith("#end document"):
            if sentences is None:
                raise ValueError(f"{source}: '#end document' without '#begin document'.")
            yield sentences
            sentences = None
    if sentences is not None:
        raise ValueError(f"{file} ends within a document; '#end document' is missing.")


def _sentence(rows: list[tuple[str, list[str]]]) -> _Sentence:
    mentions, opened = [], []
    for position, (source, row) in enumerate(rows):
        if len(row) < 6 or len(row) != len(rows[0][1]):
            raise ValueError(
                f"{source}: {len(row)} columns; a word needs at least document, part, number, word, tag and "
                "coreference, and the same number of columns as the first word of its sentence."
            )
        if row[3] == "[WORD]":
            raise ValueError(f"{source}: the file has no words; create *_conll files from these *_skel files.")
        for bracket in row[-1].split("|") if row[-1] not in ("-", "_") else ():
            match = re.fullmatch(r"(\()?(\d+)(\))?", bracket)
            if match is None or not (match[1] or match[3]):
                raise ValueError(f"{source}: coreference {row[-1]!r} must be (12, 12), (12) or several joined by |.")
            if match[1]:
                opened.append((match[2], position, source))
            if match[3]:
                begin = next((one for one in reversed(opened) if one[0] == match[2]), None)
                if begin is None:
                    raise ValueError(f"{source}: {bracket} closes a mention that was not opened in this sentence.")
                opened.remove(begin)
                mentions.append((int(match[2]), begin[1], position + 1))
    if opened:
        raise ValueError(f"{opened[0][2]}: ({opened[0][0]} opens a mention that is not closed in this sentence.")
    return _Sentence(rows[0][0], [row[3] for _, row in rows], [row[4] for _, row in rows], mentions)


def _windows(sentences: list[_Sentence], max_words: int) -> Iterator[list[_Sentence]]:
    window: list[_Sentence] = []
    for sentence in sentences:
        if window and sum(len(one.words) for one in window) + len(sentence.words) > max_words:
            yield window
            window = []
        window.append(sentence)
    if window:
        yield window


def _items_of_window(window: list[_Sentence]) -> Iterator[CoreferenceItem]:
    words, mentions = [], []
    for sentence in window:
        for chain, start, stop in sentence.mentions:
            head = start + _head(sentence.tags[start:stop])
            mention = Mention(start, stop, head).shifted(len(words))
            mentions.append((mention, chain, _group(sentence.tags[head])))
        words += sentence.words
    for mention, chain, group in sorted(mentions):
        earlier = [(other, of) for other, of, _ in sorted(mentions) if other.head < mention.start]
        antecedents = [other for other, of in earlier if of == chain]
        if antecedents:
            others = [other for other, of in earlier if of != chain]
            yield _item(window[0].source, words, mention, antecedents, others, group)


_AFTER_THE_HEAD = {"IN", "TO", "WDT", "WP", "WP$", "WRB", ",", ":", "-LRB-", "MD"}


def _head(tags: Sequence[str]) -> int:
    """Index of the head among the words of a mention, by their tags."""
    last = None
    for index, tag in enumerate(tags):
        if tag.startswith(("NN", "PRP")):
            last = index
        elif last is not None and (tag in _AFTER_THE_HEAD or tag.startswith("VB")):
            break
    return len(tags) - 1 if last is None else last


def _group(tag: str) -> str:
    if tag.startswith("PRP"):
        return "pronominal"
    return "proper" if tag.startswith("NNP") else "nominal"


_EMBEDDED = """
[The king] told the nurse that [he] would leave the city at once.
The king told [the nurse] that [she] could open the window.
[The sister] of the baker sold [her] house by the river.
The sister of [the baker] praised [his] bread.
[My uncle] met the girls at the station and drove [his] car home.
My uncle met [the queen] at the station and carried [her] bag.
[The actress] thanked the driver before [she] went inside.
The actress thanked [the driver] before [he] went home.
[The boys] found an old map and showed the lady what [they] had found.
The boys found [an old map] and sold [it] to the lady.
Because [the doctor] was late, the waiter brought [her] soup to the office.
[The waiter] dropped a glass while the guests were singing and cut [himself].
[The lady] that the boys had seen bought [herself] a hat.
The lady wrote to [the farmers] when the rain had ruined [their] fields.
[The dog] chased the cats until [it] was tired.
The dog chased [the cats] until [they] climbed a tree.
[The writer] lost the letter, and the whole town helped [him] to look for it.
The writer lost [the letter], but the maid found [it] under the table.
[The mother] of the boy asked the teacher to call [her] in the evening.
The mother of [the boy] asked the teacher to help [him] with the sums.
"""


def embedded_coreference() -> list[CoreferenceItem]:
    """Twenty built-in English sentences in which a pronoun refers to one of several entities.

    Returns:
        `list[CoreferenceItem]`: items of the group `pronominal`.

    Example:
        >>> item = embedded_coreference()[0]
        >>> item.words[item.mention.head], item.words[item.antecedents[0].head]
        ('he', 'king')
    """
    lines = enumerate(_EMBEDDED.strip().split("\n"), 1)
    return _bracketed([(f"embedded sentence {number}", line) for number, line in lines], "pronominal")
