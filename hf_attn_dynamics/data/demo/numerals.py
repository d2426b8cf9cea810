# Licensed under the Apache License, Version 2.0.
"""Synthetic translation of number words from German to English, which is easy to verify."""

import functools
import random
import zlib
from array import array
from collections.abc import Iterable, Sequence

from datasets import Dataset

from ..parallel import PAIRS
from .checks import check_positive


LARGEST = 999_999

GERMAN_UNITS = (
    *("null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf"),
    *("dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn"),
)
GERMAN_TENS = ("zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig")
ENGLISH_UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
ENGLISH_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")

# {0}, {1} and {2} are numbers. Some translations reverse their order, or join a separable German verb.
PHRASES = (
    ("{0}", "{0}"),
    ("{0} plus {1}", "{0} plus {1}"),
    ("{0} minus {1}", "{0} minus {1}"),
    ("{0} mal {1}", "{0} times {1}"),
    ("{0} geteilt durch {1}", "{0} divided by {1}"),
    ("von {0} bis {1}", "from {0} to {1}"),
    ("{0} ist größer als {1}", "{0} is greater than {1}"),
    ("nicht {0}, sondern {1}", "{1}, not {0}"),
    ("ziehe {0} von {1} ab", "subtract {0} from {1}"),
    ("zähle {0} und {1} zusammen", "add up {0} and {1}"),
    ("{0}, {1} und {2}", "{0}, {1} and {2}"),
)
ALWAYS_SHARED = 100  # smaller numbers are parts of all others, and thus in both splits
HELD_OUT = 10  # one in this many numbers is held out for validation


def german_numeral(number: int) -> str:
    """Spells a number in German, as a single word.

    Args:
        number (`int`): Number from 0 to 999,999.

    Returns:
        `str`: the word, with "ein" before "hundert" and "tausend".

    Raises:
        ValueError: if the number is not an integer in this range.

    Example:
        >>> german_numeral(723), german_numeral(21_101)
        ('siebenhundertdreiundzwanzig', 'einundzwanzigtausendeinhunderteins')
    """
    thousands, rest = divmod(_checked(number), 1000)
    if not thousands:
        return _german_below_thousand(rest)
    # "eins" is "ein" before another word: "eintausend", "hunderteintausend".
    words = _german_below_thousand(thousands)
    words = words.removesuffix("s") if words.endswith("eins") else words
    return words + "tausend" + (_german_below_thousand(rest) if rest else "")


def english_numeral(number: int) -> str:
    """Spells a number in English, with a hyphen between tens and units and without "and".

    Args:
        number (`int`): Number from 0 to 999,999.

    Returns:
        `str`: the words.

    Raises:
        ValueError: if the number is not an integer in this range.

    Example:
        >>> english_numeral(723), english_numeral(21_101)
        ('seven hundred twenty-three', 'twenty-one thousand one hundred one')
    """
    thousands, rest = divmod(_checked(number), 1000)
    if not thousands:
        return _english_below_thousand(rest)
    return f"{_english_below_thousand(thousands)} thousand" + (f" {_english_below_thousand(rest)}" if rest else "")


def numeral_pairs(count: int, seed: int = 0, largest: int = LARGEST) -> list[tuple[str, str]]:
    """Draws phrases with one to three numbers, in German and English.

    All numbers of digits are equally likely.

    Args:
        count (`int`): Number of unique pairs.
        seed (`int`): Random seed.
        largest (`int`): Largest number, at most 999,999.

    Returns:
        `list[tuple[str, str]]`: German and English phrases, a deterministic function of the arguments.

    Raises:
        ValueError: if `count` is less than 1 or too large for these numbers, or `largest` is out of range.

    Example:
        >>> for german, english in numeral_pairs(2, largest=99):
        ...     print(german, "|", english)
        fünfzehn ist größer als fünfundsiebzig | fifteen is greater than seventy-five
        nicht achtundvierzig, sondern fünfundfünfzig | fifty-five, not forty-eight
    """
    numbers = _numbers(largest, held_out=None)
    _check_size("count", count, numbers)
    return _draw(count, random.Random(seed), numbers)


def embedded_translation(
    train_size: int = 20_000, validation_size: int = 1_000, seed: int = 0, largest: int = LARGEST
) -> tuple[Dataset, Dataset]:
    """Synthetic translation of number phrases from German to English, see [`numeral_pairs`].

    No phrase, and no number from 100 on, is in both splits, so that validation measures composition, not memorisation.

    Args:
        train_size (`int`): Number of training pairs.
        validation_size (`int`): Number of validation pairs.
        seed (`int`): Random seed.
        largest (`int`): Largest number, at most 999,999.

    Returns:
        `tuple[datasets.Dataset, datasets.Dataset]`: training and validation, with the columns `source` (German) and
        `target` (English).

    Raises:
        ValueError: see [`numeral_pairs`].

    Example:
        >>> train, validation = embedded_translation(train_size=3, validation_size=1, largest=20)
        >>> len(train), validation.column_names
        (3, ['source', 'target'])
    """
    check_positive(train_size=train_size, validation_size=validation_size)
    for_train, for_validation = _numbers(largest, held_out=False), _numbers(largest, held_out=True)
    # If `largest` is below 100, both splits draw from the same phrases.
    _check_size("train_size + validation_size", train_size + validation_size, for_train)
    _check_size("validation_size", validation_size, for_validation)
    generator = random.Random(seed)
    validation = _draw(validation_size, generator, for_validation)
    train = _draw(train_size, generator, for_train, excluded=validation)
    return _dataset(train), _dataset(validation)


def _dataset(pairs: list[tuple[str, str]]) -> Dataset:
    return Dataset.from_dict(
        {"source": [pair[0] for pair in pairs], "target": [pair[1] for pair in pairs]}, features=PAIRS
    )


def _checked(number: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= LARGEST:
        raise ValueError(f"number must be an integer from 0 to {LARGEST}, got {number!r}.")
    return number


def _german_below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    words = f"{_german_part(hundreds)}hundert" if hundreds else ""
    if not rest:
        return words or GERMAN_UNITS[0]
    if rest < 20:
        return words + GERMAN_UNITS[rest]
    tens, units = divmod(rest, 10)
    return words + (f"{_german_part(units)}und" if units else "") + GERMAN_TENS[tens - 2]


def _german_part(unit: int) -> str:
    return "ein" if unit == 1 else GERMAN_UNITS[unit]


def _english_below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    words = [ENGLISH_UNITS[hundreds], "hundred"] if hundreds else []
    tens, units = divmod(rest, 10)
    if rest >= 20:
        words.append(ENGLISH_TENS[tens - 2] + (f"-{ENGLISH_UNITS[units]}" if units else ""))
    elif rest or not words:
        words.append(ENGLISH_UNITS[rest])
    return " ".join(words)


def _numbers(largest: int, held_out: bool | None) -> list[Sequence[int]]:
    """The numbers of a split, or all numbers if `held_out` is `None`, grouped by their number of digits."""
    if isinstance(largest, bool) or not isinstance(largest, int) or not 1 <= largest <= LARGEST:
        raise ValueError(f"largest must be an integer from 1 to {LARGEST}, got {largest!r}.")
    groups: list[Sequence[int]] = [range(min(10, largest + 1))]
    groups += [range(10**digits, min(10 ** (digits + 1), largest + 1)) for digits in range(1, len(str(largest)))]
    if held_out is not None:
        groups = [_split(group)[held_out] for group in groups]
    return [group for group in groups if group]


@functools.lru_cache(maxsize=8)
def _split(group: range) -> tuple[array, array]:
    """Training numbers and held-out numbers; small numbers are in both."""
    sides = array("i"), array("i")
    for number in group:
        if number < ALWAYS_SHARED:
            sides[0].append(number)
            sides[1].append(number)
        else:
            sides[zlib.crc32(b"%d" % number) % HELD_OUT == 0].append(number)
    return sides


def _slots(phrase: str) -> int:
    return sum(slot in phrase for slot in ("{0}", "{1}", "{2}"))


def _check_size(name: str, size: int, numbers: list[Sequence[int]]) -> None:
    # Half of all phrases, so that rejection of duplicates terminates quickly.
    most = sum(sum(map(len, numbers)) ** _slots(german) for german, _ in PHRASES) // 2
    if not 1 <= size <= most:
        raise ValueError(f"{name} must be from 1 to {most} for numbers up to `largest`, got {size}.")


def _draw(
    size: int, generator: random.Random, numbers: list[Sequence[int]], excluded: Iterable[tuple[str, str]] = ()
) -> list[tuple[str, str]]:
    excluded = set(excluded)
    pairs: dict[tuple[str, str], None] = {}
    while len(pairs) < size:
        german, english = generator.choice(PHRASES)
        drawn = [generator.choice(generator.choice(numbers)) for _ in range(_slots(german))]
        pair = german.format(*map(german_numeral, drawn)), english.format(*map(english_numeral, drawn))
        if pair not in excluded:
            pairs[pair] = None
    return list(pairs)
