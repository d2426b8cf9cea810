# Licensed under the Apache License, Version 2.0.
"""Roles of heads, sentence by sentence and word by word, from whole attention maps."""

from collections import Counter

import torch

from hf_attn_dynamics.data import encode_words


@torch.no_grad()
def maps_of(model, ids):
    """Maps of one sentence as the eager functions return them, `(layers, heads, queries, keys)`, by kind of site."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    inputs = {"input_ids": torch.tensor([ids])}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    outputs = model(**inputs, output_attentions=True)
    model.set_attn_implementation(before)
    if model.config.is_encoder_decoder:
        names = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
        return {kind: torch.stack(outputs[name])[:, 0].double() for kind, name in names.items()}
    causal = any(getattr(module, "is_causal", False) for module in model.modules())
    return {"decoder" if causal else "encoder": torch.stack(outputs.attentions)[:, 0].double()}


def argmax_among(row, competing):
    """Index of the largest of some entries."""
    return max(competing, key=lambda index: row[index].item())


def syntactic_accuracy(model, tokenizer, trees, relation, direction, special_tokens=False, own_word=False):
    """Accuracy of each head, `(layers, heads)`; number of cases; accuracy of the best offset."""
    hits, offsets = [], Counter()
    for tree in trees:
        ids, words = encode_words(tree, tokenizer)
        (maps,) = [table for kind, table in maps_of(model, ids).items() if kind == "encoder" or not is_seq2seq(model)]
        units = [number if word is None else f"word {word}" for number, word in enumerate(words)]
        for dependent, (head, of) in enumerate(zip(tree.heads, tree.relations)):
            if of != relation or head is None or not {dependent, head} <= set(words):
                continue
            source, target = (dependent, head) if direction == "to head" else (head, dependent)
            offsets[target - source] += 1
            hits.append([])
            for layer in maps:
                hits[-1].append([])
                for weights in layer:
                    rows = [row for row, word in zip(weights, words) if word == source]
                    received = Counter()
                    for index, unit in enumerate(units):
                        if unit == f"word {source}" and not own_word:
                            continue
                        if words[index] is None and not special_tokens:
                            continue
                        received[unit] += sum(row[index].item() for row in rows) / len(rows)
                    hits[-1][-1].append(max(received, key=received.get) == f"word {target}")
    accuracy = torch.tensor(hits, dtype=torch.float64).mean(0)
    return accuracy, len(hits), max(offsets.values()) / len(hits)


def is_seq2seq(model):
    return model.config.is_encoder_decoder


def token_role(model, sentences, kind, targets_of, excluded):
    """Share of rows whose argmax is a target, `(layers, heads)`; number of rows; mean share of targets by chance.

    Args:
        targets_of (callable): Maps the ids of a sentence and the position of a row to the positions that compete and
            the targets among them; `None` if the row does not count.
    """
    hits, chances = [], []
    for ids in sentences:
        maps = maps_of(model, ids)[kind]
        for row, token in enumerate(ids):
            found = None if token in excluded else targets_of(ids, row)
            if found is None:
                continue
            competing, targets = found
            chances.append(len(targets) / len(competing))
            hits.append([[argmax_among(head[row], competing) in targets for head in layer] for layer in maps])
    return torch.tensor(hits, dtype=torch.float64).mean(0), len(hits), sum(chances) / len(chances)


def rare_targets(counts, excluded, frequent, rank):
    """What [`token_role`] needs to know of the `rank` rarest tokens."""
    limit = sorted(counts, reverse=True)[frequent - 1]

    def targets_of(ids, row):
        competing = [place for place, token in enumerate(ids) if token not in excluded]
        rarest = sorted(counts[ids[place]] for place in competing)
        if rarest[0] >= limit:
            return None
        most = rarest[min(rank, len(rarest)) - 1]
        return competing, [place for place in competing if counts[ids[place]] <= most]

    return targets_of


def duplicate_targets(excluded, kind):
    """What [`token_role`] needs to know of tokens that occur elsewhere."""

    def targets_of(ids, row):
        seen = {"encoder": {*range(len(ids))} - {row}, "decoder": {*range(row)}, "cross": {*range(len(ids))}}[kind]
        competing = [place for place in sorted(seen) if ids[place] not in excluded]
        targets = [place for place in competing if ids[place] == ids[row]]
        return (competing, targets) if targets else None

    return targets_of
