"""IBM Model 1 and its diagonal prior as their equations read: dense tables, one word at a time."""

import math
from collections import defaultdict


def dense_ibm_model_1(pairs, iterations, null_word):
    """`(counts, trans, log_likelihoods)`, the tables as `{source: {target: value}}` over all pairs of words."""
    null = [None] if null_word else []
    pairs = [(null + list(source), list(target)) for source, target in pairs]
    targets = {word for _, target in pairs for word in target}
    sources = {word for source, _ in pairs for word in source}
    trans = {i: dict.fromkeys(targets, 1 / len(targets)) for i in sources}
    log_likelihoods = [_log_likelihood(pairs, trans)]
    for _ in range(iterations):
        counts = {i: defaultdict(float) for i in sources}
        for source, target in pairs:
            for o in target:
                alpha = responsibilities(source, o, trans)
                for i, share in zip(source, alpha):
                    counts[i][o] += share
        trans = {i: {o: counts[i][o] / sum(counts[i].values()) for o in targets} for i in sources}
        log_likelihoods.append(_log_likelihood(pairs, trans))
    return counts, trans, log_likelihoods


def responsibilities(source, o, trans):
    """α^IBM of each source word for one target word."""
    beta = [trans[i][o] for i in source]
    return [value / sum(beta) for value in beta]


def viterbi(source, target, trans, null_word):
    """Links of one pair, the last of equal ones, any source word before NULL."""
    links = []
    for place, o in enumerate(target):
        best, best_position = (trans[None][o] if null_word else 0), None
        for position, i in enumerate(source):
            if trans[i][o] >= best:
                best, best_position = trans[i][o], position
        if best_position is not None:
            links.append((best_position, place))
    return sorted(links)


def _log_likelihood(pairs, trans):
    return sum(math.log(sum(trans[i][o] for i in source) / len(source)) for source, target in pairs for o in target)


def diagonal_priors(place, source, targets, tension, null_probability):
    """Prior probability of each source word, the first of which may be `None`, for the target word at a place."""
    words = [word for word in source if word is not None]
    raw = [math.exp(-tension * abs((place + 1) / targets - (at + 1) / len(words))) for at in range(len(words))]
    if len(words) == len(source):
        return [value / sum(raw) for value in raw]
    return [null_probability] + [(1 - null_probability) * value / sum(raw) for value in raw]


def dense_diagonal_model(pairs, iterations, null_word, tension, null_probability, fits_tension):
    """`(trans, tensions, log_likelihoods)` with a diagonal prior; the best tension is found by ternary search."""
    null = [None] if null_word else []
    pairs = [(null + list(source), list(target)) for source, target in pairs]
    targets = {word for _, target in pairs for word in target}
    sources = {word for source, _ in pairs for word in source}
    trans = {i: dict.fromkeys(targets, 1 / len(targets)) for i in sources}

    def joint(source, target, place):
        prior = diagonal_priors(place, source, len(target), tension, null_probability)
        return [own * trans[i][target[place]] for own, i in zip(prior, source)]

    def log_likelihood():
        return sum(math.log(sum(joint(s, t, place))) for s, t in pairs for place in range(len(t)))

    log_likelihoods, tensions = [log_likelihood()], [tension]
    for _ in range(iterations):
        counts, shares = {i: defaultdict(float) for i in sources}, []
        for source, target in pairs:
            for place, o in enumerate(target):
                values = joint(source, target, place)
                shares.append((place, source, target, [value / sum(values) for value in values]))
                for i, share in zip(source, shares[-1][-1]):
                    counts[i][o] += share
        trans = {i: {o: counts[i][o] / sum(counts[i].values()) for o in targets} for i in sources}

        def expected(candidate, shares=shares):
            return sum(
                share * math.log(own)
                for place, source, target, row in shares
                for own, share in zip(diagonal_priors(place, source, len(target), candidate, null_probability), row)
                if share
            )

        if fits_tension:
            low, high = 0.0, 50.0
            for _ in range(80):
                one, other = low + (high - low) / 3, high - (high - low) / 3
                low, high = (one, high) if expected(one) < expected(other) else (low, other)
            tension = (low + high) / 2
        tensions.append(tension)
        log_likelihoods.append(log_likelihood())
    return trans, tensions, log_likelihoods


def grow_diag_final(forward, backward, method, sources, targets):
    """Links of one pair by scans of the whole table, as the pseudocode of Koehn et al. and Moses' `symal` read."""
    state = [[None] * sources for _ in range(targets)]  # "linked", or in one alignment only
    for target in range(targets):
        for source in range(sources):
            one, other = (source, target) in forward, (source, target) in backward
            state[target][source] = "linked" if one and other else "forward" if one else "backward" if other else None

    def has_link(target=None, source=None):
        row = range(targets) if target is None else [target]
        column = range(sources) if source is None else [source]
        return any(state[t][s] == "linked" for t in row for s in column)

    added = True
    while added:
        added = False
        for target in range(targets):
            for source in range(sources):
                if state[target][source] != "linked":
                    continue
                for down, right in [(-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1)]:
                    t, s = target + down, source + right
                    if not (0 <= t < targets and 0 <= s < sources) or state[t][s] in (None, "linked"):
                        continue
                    if not (has_link(target=t) and has_link(source=s)):
                        state[t][s] = "linked"
                        added = True
    for direction in ("forward", "backward") if "final" in method else ():
        for target in range(targets):
            for source in range(sources):
                linked = has_link(target=target), has_link(source=source)
                is_free = not any(linked) if method.endswith("and") else not all(linked)
                if state[target][source] == direction and is_free:
                    state[target][source] = "linked"
    return sorted((s, t) for t in range(targets) for s in range(sources) if state[t][s] == "linked")
