# Licensed under the Apache License, Version 2.0.
"""Varied English sentences with dependency trees, to show what attention heads do."""

from pathlib import Path

from ..conllu import Tree, load_conllu


FILE = Path(__file__).with_name("sentences.conllu")


def embedded_sentences() -> list[Tree]:
    """Twenty English sentences with trees in Universal Dependencies 2, from a CoNLL-U file in the package.

    They have 9 to 18 words, and are more varied than those of [`embedded_trees`]: pronouns with one or two possible
    antecedents, repeated words, numbers, rare words and names, questions, passives, coordination, and relative,
    complement and adverbial clauses. They suit the examples of a page or a notebook; scores of heads need more text.

    Returns:
        `list[Tree]`

    Example:
        >>> tree = embedded_sentences()[2]
        >>> tree.text
        'The letter that the teacher wrote was lost by the postman.'
        >>> tree.words[tree.heads[1]], tree.relations[1]
        ('lost', 'nsubj:pass')
    """
    return load_conllu(FILE)
