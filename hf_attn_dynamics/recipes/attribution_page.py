# Licensed under the Apache License, Version 2.0.
"""HTML page of [`AttributionFindings`]: the claims of the paper and the pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..analysis.attribution.claims import AttributionFindings, attribution_drawings, claim_table
from ..analysis.pages.attribution_explorer import add_contributions
from ..analysis.pages.html import HtmlPage, drawn
from ..analysis.plots.attribution import MapExample
from ..analysis.sentence_maps import SentenceMaps


DEFINITIONS = {
    "contribution": "‖∂o/∂x‖ of a head's output at a position for each input, as a fraction of the sum over inputs; "
    "in the layer: for the layer's own inputs, of the input: for the input embeddings of the first layer",
    "Pearson, Spearman": "mean correlation over rows, of attention with contributions of the input or of the layer's "
    "inputs; of value-weighted attention: with contributions in the layer",
    "early, deep, late": "the first third of the layers, all others, the last third; upper: all but the first quarter",
    "by relative position": "mean over the queries that have a token at this offset",
    "center of mass": "Σ offset · value / Σ value over these means, in tokens",
    "distance to uniform": "total variation distance of these means to a uniform distribution, from 0 to 1",
    "types": "most mass in two columns (vertical), next to the query (diagonal), in the segment of the query "
    "(block), or none of these (heterogeneous), in excess of the mass of uniform rows",
    "interval": "the middle 95 % of a metric over 1,000 bootstrap resamples: as many texts as there are, drawn with "
    "replacement; of more than 200 texts, 200 groups of consecutive texts",
    "holds": "whether the claim holds for all texts, if at least 95 % of the resamples agree; otherwise it is not "
    "judged",
}


def name_of(summary: Mapping[str, Any]) -> str:
    """Model and data of a run, for titles."""
    return f"{summary['model']} on {summary['sentences']:,} texts"


def attribution_page(
    findings: AttributionFindings,
    summary: Mapping[str, Any],
    examples: Sequence[MapExample] = (),
    sentence_maps: Sequence[SentenceMaps] = (),
    facts: Mapping[str, Any] | None = None,
    pictures: str | Path | None = None,
) -> HtmlPage:
    """The page: the claims and the pictures.

    Args:
        findings ([`AttributionFindings`]): The findings.
        summary (`dict`): Metrics of the run: `model`, `sentences`, `tokens`, `too_short`, `too_long`, `identifiable`,
            `method`, `seconds`, `device`.
        examples (`list[MapExample]`): Maps of single heads.
        sentence_maps (`list[SentenceMaps]`): Attention and contributions in some texts.
        facts (`dict[str, Any]`, *optional*): Rows of the section about how the page was made.
        pictures (`str` or `Path`, *optional*): Folder to save the pictures to, in addition.
    """
    figures = drawn(attribution_drawings(findings, examples, name_of(summary)), pictures)
    page = HtmlPage(f"Contributions to the attention heads of {summary['model']}")
    page.definitions(DEFINITIONS)
    page.heading("What was measured")
    page.paragraph(
        f"{summary['sentences']:,} texts with {summary['tokens']:,} tokens; {summary['too_short']:,} more were too "
        f"short and {summary['too_long']:,} too long. {summary['identifiable']:,} have at most as many tokens as a "
        f"head has dimensions, so their attention weights are identifiable. Contributions of the input: "
        f"{summary['method']}. {summary['seconds']:.1f} seconds on {summary['device']}."
    )
    page.heading("Heads")
    add_contributions(page, findings, sentence_maps)
    page.heading("Claims of the paper")
    page.table(*claim_table(findings.claims(), findings.not_judged()))
    page.heading("Attention and contributions in the layer")
    page.picture(
        figures["local"], "Mean correlation of attention with contributions of the layer's inputs; a dot per head."
    )
    page.paragraph(
        f"As a check: the mean Pearson correlation with these contributions is "
        f"{findings.correlations['value_weighted'].pearson.mean():.3f} for attention times the norm of values, and "
        f"{findings.correlations['local'].pearson.mean():.3f} for attention alone."
    )
    page.heading("Relative positions")
    page.picture(figures["positions"], "By relative position: attention above, contributions of the input below.")
    page.picture(figures["centers"], "Centers of mass by relative position; negative values are the past.")
    page.heading("Attention and contributions of the input")
    page.picture(
        figures["global"], "Correlation of attention with contributions of the model's input; a dot per head."
    )
    page.heading("Types of maps")
    page.picture(figures["types"], "Fractions of types in each layer, of attention and of contributions of the input.")
    if examples:
        page.picture(
            figures["examples"], "For each type, the head whose attention has it most often, in one sentence."
        )
    page.facts(facts or {})
    return page
