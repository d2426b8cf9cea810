import random
import re

import pytest

from hf_attn_dynamics.data import embedded_translation, english_numeral, german_numeral, numeral_pairs
from hf_attn_dynamics.data.demo.numerals import LARGEST, PHRASES


KNOWN = {
    0: ("null", "zero"),
    1: ("eins", "one"),
    7: ("sieben", "seven"),
    10: ("zehn", "ten"),
    11: ("elf", "eleven"),
    12: ("zwölf", "twelve"),
    16: ("sechzehn", "sixteen"),
    17: ("siebzehn", "seventeen"),
    20: ("zwanzig", "twenty"),
    21: ("einundzwanzig", "twenty-one"),
    30: ("dreißig", "thirty"),
    44: ("vierundvierzig", "forty-four"),
    66: ("sechsundsechzig", "sixty-six"),
    77: ("siebenundsiebzig", "seventy-seven"),
    100: ("einhundert", "one hundred"),
    101: ("einhunderteins", "one hundred one"),
    116: ("einhundertsechzehn", "one hundred sixteen"),
    121: ("einhunderteinundzwanzig", "one hundred twenty-one"),
    723: ("siebenhundertdreiundzwanzig", "seven hundred twenty-three"),
    1000: ("eintausend", "one thousand"),
    1001: ("eintausendeins", "one thousand one"),
    1100: ("eintausendeinhundert", "one thousand one hundred"),
    2017: ("zweitausendsiebzehn", "two thousand seventeen"),
    21_000: ("einundzwanzigtausend", "twenty-one thousand"),
    100_000: ("einhunderttausend", "one hundred thousand"),
    101_000: ("einhunderteintausend", "one hundred one thousand"),
    101_101: ("einhunderteintausendeinhunderteins", "one hundred one thousand one hundred one"),
    200_030: ("zweihunderttausenddreißig", "two hundred thousand thirty"),
    999_999: (
        "neunhundertneunundneunzigtausendneunhundertneunundneunzig",
        "nine hundred ninety-nine thousand nine hundred ninety-nine",
    ),
}

UNITS = ["", "ein", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
SMALL = {"zehn": 10, "elf": 11, "zwölf": 12, "sechzehn": 16, "siebzehn": 17, "eins": 1, "": 0}
SMALL |= {word: value for value, word in enumerate(UNITS) if value > 1}
SMALL |= {UNITS[value] + "zehn": 10 + value for value in (3, 4, 5, 8, 9)}
TENS = {"zwanzig": 20, "dreißig": 30} | {UNITS[value] + "zig": 10 * value for value in (4, 5, 8, 9)}
TENS |= {"sechzig": 60, "siebzig": 70}


def read_german(words):
    """The number that German words say, taken apart from left to right."""
    if words == "null":
        return 0
    thousands, found, rest = words.rpartition("tausend")
    # The last word before "tausend" is "ein", which only there ends a number.
    thousands = re.sub("ein$", "eins", thousands)
    value = 0
    for part, weight in ((thousands, 1000), (rest, 1)):
        hundreds, _, below = part.rpartition("hundert")
        value += weight * 100 * (UNITS.index(hundreds) if hundreds else 0)
        if below in SMALL:
            value += weight * SMALL[below]
        else:
            units, _, tens = below.rpartition("und")
            value += weight * (UNITS.index(units) + TENS[tens])
    return value


def read_english(words):
    """The number that English words say, summed up word by word."""
    units = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    values = {word: value for value, word in enumerate(f"{units} seventeen eighteen nineteen".split())}
    tens = "twenty thirty forty fifty sixty seventy eighty ninety"
    values |= {word: 10 * value for value, word in enumerate(tens.split(), 2)}
    total = group = 0
    for word in words.replace("-", " ").split():
        if word == "thousand":
            total, group = 1000 * group, 0
        elif word == "hundred":
            group *= 100
        else:
            group += values[word]
    return total + group


@pytest.mark.parametrize(("number", "words"), KNOWN.items())
def test_words_are_those_of_the_dictionary(number, words):
    assert (german_numeral(number), english_numeral(number)) == words


def test_words_say_their_number():
    numbers = [*range(3000), *random.Random(0).sample(range(LARGEST + 1), 5000)]
    assert [read_german(german_numeral(number)) for number in numbers] == numbers
    assert [read_english(english_numeral(number)) for number in numbers] == numbers


@pytest.mark.parametrize("number", [-1, 1_000_000, 2.0, "3", True])
@pytest.mark.parametrize("spell", [german_numeral, english_numeral])
def test_other_numbers_are_refused(spell, number):
    with pytest.raises(ValueError, match="number must be an integer from 0 to 999999"):
        spell(number)


def parse(pair):
    """The numbers of both sides, in the order of the German side."""
    for german, english in PHRASES:
        sides = []
        for phrase, words in ((german, pair[0]), (english, pair[1])):
            names = re.findall(r"\{(\d)\}", phrase)
            match = re.fullmatch(
                re.sub(r"\\\{\d\\\}", r"([^ ,]+)" if words == pair[0] else r"(.+)", re.escape(phrase)), words
            )
            sides.append(match and dict(zip(names, match.groups())))
        if all(sides):
            return [(read_german(sides[0][name]), read_english(sides[1][name])) for name in sorted(sides[0])]
    raise AssertionError(pair)


def test_both_sides_of_a_phrase_have_the_same_numbers():
    phrases = numeral_pairs(500, seed=3)
    for pair in phrases:
        assert all(german == english for german, english in parse(pair)), pair
    assert {len(parse(pair)) for pair in phrases} == {1, 2, 3}


def test_numbers_of_all_lengths_come_equally_often():
    lengths = [len(str(number)) for pair in numeral_pairs(2000) for number, _ in parse(pair)]
    for digits in range(1, 7):
        assert lengths.count(digits) == pytest.approx(len(lengths) / 6, rel=0.15)


def test_pairs_differ_and_depend_on_the_seed_alone():
    pairs = numeral_pairs(300, seed=1, largest=20)
    assert len(set(pairs)) == 300
    assert pairs == numeral_pairs(300, seed=1, largest=20) != numeral_pairs(300, seed=2, largest=20)


def test_numbers_stay_below_the_largest():
    assert max(number for pair in numeral_pairs(500, largest=123) for number, _ in parse(pair)) == 123


def test_splits_share_no_phrase_and_no_large_number():
    train, validation = embedded_translation(3000, 300)
    assert (len(train), len(validation)) == (3000, 300)
    phrases, numbers = [], []
    for split in (train, validation):
        pairs = list(zip(split["source"], split["target"]))
        phrases.append(set(pairs))
        numbers.append({number for pair in pairs for number, _ in parse(pair)})
    assert phrases[0].isdisjoint(phrases[1])
    shared = numbers[0] & numbers[1]
    assert shared <= set(range(100))
    assert len(shared) > 50
    assert max(numbers[1]) > 100_000


def test_splits_of_small_numbers_still_share_no_phrase():
    train, validation = embedded_translation(500, 100, largest=9)
    assert set(train["source"]).isdisjoint(validation["source"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count must be from 1 to .* up to `largest`, got 0"),
        # One phrase of one number, nine of two, one of three: (2 + 9 · 4 + 8) / 2.
        ({"count": 24, "largest": 1}, "count must be from 1 to 23 .* got 24"),
        ({"count": 1, "largest": 0}, "largest must be an integer from 1 to 999999, got 0"),
        ({"count": 1, "largest": 10**6}, "largest must be .* got 1000000"),
    ],
)
def test_pairs_that_do_not_exist_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        numeral_pairs(**arguments)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1), "train_size must be at least 1.* got 0"),
        ((1, -1), "validation_size must be at least 1.* got -1"),
        ((20, 10), r"train_size \+ validation_size must be from 1 to 23 .* got 30"),
    ],
)
def test_splits_that_do_not_exist_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        embedded_translation(*sizes, largest=1)
