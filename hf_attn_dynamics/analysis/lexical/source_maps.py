# Licensed under the Apache License, Version 2.0.
"""Tables and pictures of results that have a value for each source word, for each output word of a sentence."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..notebook import MOST_ROWS, html_table


if TYPE_CHECKING:
    from matplotlib.figure import Figure


def table_of_rows(
    values: torch.Tensor, is_padding: torch.Tensor, caption: str, columns: Mapping[str, torch.Tensor] | None = None
) -> str:
    """HTML with a line for each output word: its highest value, and the position of the source word that has it.

    Args:
        values, is_padding (`torch.Tensor` of shape `(batch, target length, source length)` or `(batch, length)`):
            Values, NaN for output words that were left out, and whether they belong to padding.
        caption (`str`): A line above the table.
        columns (`dict[str, torch.Tensor]`, *optional*): Further values of the output words, of shape
            `(batch, target length)`, by heading.
    """
    columns = columns or {}
    per_target = values.dim() == 3
    if not per_target:
        values, is_padding = values[:, None], is_padding[:, None]
    shown = (~values.isnan()).any(-1).nonzero().tolist()
    rows = []
    for sentence, target in shown[:MOST_ROWS]:
        row = values[sentence, target].masked_fill(is_padding[sentence, target], -torch.inf)
        best = int(row.nan_to_num(nan=-torch.inf, neginf=-torch.inf).argmax())
        others = (one[sentence, target].item() for one in columns.values())
        words = int((~is_padding[sentence, target]).sum())
        rows.append([sentence, *([target] if per_target else []), words, row[best].item(), best, *others])
    header = ["sentence", *(["output word"] if per_target else []), "source words", "highest", "at source word"]
    rest = f"; the first {MOST_ROWS} of {len(shown):,} rows" if len(shown) > MOST_ROWS else ""
    return html_table([*header, *columns], rows, f"{caption}{rest}; positions begin at 0", digits=4)


def plot_sentence(
    values: torch.Tensor,
    is_padding: torch.Tensor,
    names: tuple[str, str],
    sentence: int,
    source: Sequence[str] | None,
    target: Sequence[str] | None,
    path: str | Path | None,
    title: str,
) -> "Figure":
    """Heat map of one sentence, without padding and without output words that were left out.

    Args:
        values, is_padding (`torch.Tensor`): See [`table_of_rows`].
        names (`tuple[str, str]`): Names of the map and of its values.
        sentence (`int`): Index in the batch.
        source, target (`list[str]`, *optional*): Tokens, of the words that are drawn or of all positions with padding;
            their positions by default.
        path (`str` or `Path`, *optional*): Where to save as PNG and, beside it, SVG.
        title (`str`): Model and data; the picture itself says what it shows.

    Raises:
        ValueError: if there is no such sentence, nothing was measured in it, or there is another number of tokens.
    """
    from ..plots.lexical import SourceMap, plot_source_maps

    if not 0 <= sentence < len(values):
        raise ValueError(f"sentence must be from 0 to {len(values) - 1}, the last one of the batch, got {sentence}.")
    per_target = values.dim() == 3
    table, is_padding = (one[sentence].detach().cpu() for one in (values, is_padding))
    if not per_target:
        table, is_padding = table[None], is_padding[None]
    has_row = ~table.isnan().all(1)
    if not has_row.any():
        raise ValueError(f"sentence {sentence} has no label, so nothing was measured in it; choose another one.")
    has_column = ~is_padding[has_row].all(0)
    columns = _tokens("source", source, has_column, sentence)
    rows = ["correct class"] if not per_target and target is None else _tokens("target", target, has_row, sentence)
    panel = SourceMap(
        f"{names[0]}: sentence {sentence}",
        rows,
        columns,
        table[has_row][:, has_column],
        "output word" if per_target else "",
    )
    return plot_source_maps([[panel]], path, title, names[1])


def _tokens(name: str, tokens: Sequence[Any] | None, shown: torch.Tensor, sentence: int) -> list[str]:
    """Tokens of the positions that are drawn."""
    positions = shown.nonzero().flatten().tolist()
    if tokens is None:
        return [str(position) for position in positions]
    if len(tokens) not in (len(positions), len(shown)):
        given = f"{len(tokens)} token{'s' * (len(tokens) != 1)}"
        padded = f", or {len(shown)} with padding" if len(shown) > len(positions) else ""
        raise ValueError(
            f"{name} has {given}; give one for each of the {len(positions)} words that are drawn of sentence "
            f"{sentence}{padded}."
        )
    chosen = tokens if len(tokens) == len(positions) else [tokens[position] for position in positions]
    return [str(token) for token in chosen]
