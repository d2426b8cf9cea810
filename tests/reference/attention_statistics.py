"""Statistics of attention, sentence by sentence and row by row, from maps that eager attention returns."""

import math

import torch


def _entropy(row):
    return -sum(weight * math.log(weight) for weight in row if weight > 0)


def _divergence(one, other):
    middle = [(p + q) / 2 for p, q in zip(one, other)]
    return _entropy(middle) - (_entropy(one) + _entropy(other)) / 2


def _mean(values):
    return sum(values) / len(values) if values else math.nan


def slow_statistics(maps, query_ids, key_ids, excluded_ids=(), limit=3, rows=None):
    """All statistics of one kind of site.

    Args:
        maps: For each sentence a tensor of shape `(layers, heads, queries, keys)`, without padding.
        query_ids, key_ids: For each sentence a list of token ids.
        excluded_ids: Tokens that do not count as targets.
        limit: The largest offset.
        rows: For each sentence the rows that stand for it in distances; all if not given.

    Returns:
        A dictionary: `confidence`, `entropy` as `(layers, heads)`; `distance` as `(layers * heads, layers * heads)`;
        `attention`, `largest` as `(layers, heads, offsets)`.
    """
    layers, heads = maps[0].shape[:2]
    offsets = range(-limit, limit + 1)
    result = {"confidence": [], "entropy": [], "attention": [], "largest": []}
    for layer in range(layers):
        for head in range(heads):
            largest, entropies = [], []
            at = {offset: [] for offset in offsets}
            hits, counted = dict.fromkeys(offsets, 0), 0
            for sentence, keys in zip(maps, key_ids):
                for place, row in enumerate(sentence[layer, head].tolist()):
                    targets = [index for index, one in enumerate(keys) if one not in excluded_ids]
                    best = max(targets, key=lambda index, row=row: row[index], default=None)
                    largest.append(0.0 if best is None else row[best])
                    entropies.append(_entropy(row))
                    for offset in offsets:
                        if 0 <= place + offset < len(row):
                            at[offset].append(row[place + offset])
                    if best is not None and row[best] > 0:
                        counted += 1
                        if best - place in hits:
                            hits[best - place] += 1
            result["confidence"].append(_mean(largest))
            result["entropy"].append(_mean(entropies))
            result["attention"].append([_mean(at[offset]) for offset in offsets])
            result["largest"].append([hits[offset] / counted if counted else math.nan for offset in offsets])
    tables = {name: torch.tensor(values, dtype=torch.float64) for name, values in result.items()}
    tables = {name: table.unflatten(0, (layers, heads)) for name, table in tables.items()}
    return {**tables, "distance": _distances(maps, query_ids, rows)}


def _distances(maps, query_ids, rows):
    together = [sentence.flatten(0, 1).tolist() for sentence in maps]
    count = len(together[0])
    table = torch.zeros(count, count, dtype=torch.float64)
    for one in range(count):
        for other in range(count):
            total = 0.0
            for index, sentence in enumerate(together):
                length = len(query_ids[index])
                chosen = range(length) if rows is None else rows[index]
                values = [_divergence(sentence[one][row], sentence[other][row]) for row in chosen]
                # The rows that were chosen stand for all of the sentence.
                total += _mean(values) * length
            table[one, other] = total / sum(map(len, query_ids))
    return table
