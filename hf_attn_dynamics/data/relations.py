# Licensed under the Apache License, Version 2.0.
"""Names of dependency relations, which differ between treebanks."""

# Names in Universal Dependencies 1 and in spaCy's English models of relations in Universal Dependencies 2.
OTHER_NAMES = {"dobj": "obj", "nsubjpass": "nsubj:pass", "csubjpass": "csubj:pass", "auxpass": "aux:pass"}


def is_relation(relation: str, wanted: str, subtypes: bool = False) -> bool:
    """Whether a relation of a tree is the wanted one, also under its name in Universal Dependencies 1.

    Args:
        relation (`str`): Relation of a tree.
        wanted (`str`): Name of a relation.
        subtypes (`bool`): Whether subtypes of the wanted relation count, too.

    Example:
        >>> is_relation("dobj", "obj"), is_relation("nsubj:pass", "nsubj"), is_relation("nsubjpass", "nsubj", True)
        (True, False, True)
    """
    relation, wanted = OTHER_NAMES.get(relation, relation), OTHER_NAMES.get(wanted, wanted)
    return relation == wanted or (subtypes and relation.startswith(f"{wanted}:"))
