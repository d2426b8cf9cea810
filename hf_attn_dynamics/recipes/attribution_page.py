# Licensed under the Apache License, Version 2.0.
"""HTML page of [`AttributionFindings`]: the claims of the paper and the pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..analysis.attribution.claims import CLAIMS, AttributionFindings, drawings
from ..analysis.page import HtmlPage, drawn
from ..analysis.plots.attribution import MapExample


DEFINITIONS = {
    "contribution": "‖∂o/∂x‖ of what a head gives out at a position by each input, as a fraction of the sum over "
    "inputs; in the layer: by the layer's own inputs, of the input: by the embeddings that the first layer reads",
    "early, deep, late": "the first third of the layers, all others, the last third; upper: from a quarter upward",
    "by relative position": "mean over the tokens that have a token at this offset",
    "center of mass": "Σ offset · value / Σ value over these means, in tokens",
    "distance to even": "total variation between these means and equal ones, from 0 to 1",
    "types": "most mass in two columns (vertical), next to the query (diagonal), in its sentence (block), or in none "
    "of these (heterogeneous), in excess of what even rows have there",
}
ANSWERS = {True: "yes", False: "no"}


def page_of(
    findings: AttributionFindings,
    summary: Mapping[str, Any],
    examples: Sequence[MapExample] = (),
    facts: Mapping[str, Any] | None = None,
    pictures: str | Path | None = None,
) -> HtmlPage:
    """The page: the claims, and the pictures that they come from.

    Args:
        findings ([`AttributionFindings`]): What was measured.
        summary (`dict`): Of the run: `model`, `sentences`, `tokens`, `too_short`, `too_long`, `identifiable`,
            `method`, `seconds`, `device`.
        examples (`list[MapExample]`): Maps of single heads.
        facts (`dict[str, Any]`, *optional*): What to say about how the page was made.
        pictures (`str` or `Path`, *optional*): A folder that the pictures are written to as well.
    """
    figures = drawn(drawings(findings, examples), pictures)
    page = HtmlPage(f"What reaches the attention heads of {summary['model']}")
    page.heading("What was measured")
    page.paragraph(
        f"{summary['sentences']:,} texts of {summary['tokens']:,} tokens; {summary['too_short']:,} more were too "
        f"short and {summary['too_long']:,} too long. {summary['identifiable']:,} have no more tokens than a head has "
        f"dimensions, so that attention can be told from what heads give out. Contributions of the input: "
        f"{summary['method']}. {summary['seconds']:.1f} seconds on {summary['device']}."
    )
    page.heading("Claims of the paper")
    page.table(*claim_table(findings.claims(), findings.not_judged()))
    page.heading("Attention and contributions in the layer")
    page.picture(
        figures["local"], "Mean correlation of attention with contributions of the layer's inputs; a dot a head."
    )
    page.paragraph(
        f"As a check, attention times the length of values has a correlation of "
        f"{findings.correlations['value_weighted'].pearson.mean():.3f} with them, attention alone "
        f"{findings.correlations['local'].pearson.mean():.3f}."
    )
    page.heading("Where heads look, and what they see")
    page.picture(figures["positions"], "By relative position: attention above, contributions of the input below.")
    page.picture(figures["centers"], "Centers of mass by relative position; below zero is the past.")
    page.heading("Attention and contributions of the input")
    page.picture(figures["global"], "Correlation of attention with contributions of the model's input; a dot a head.")
    page.heading("Types of maps")
    page.picture(figures["types"], "Fractions of types in each layer, of attention and of contributions of the input.")
    if examples:
        page.picture(figures["examples"], "Heads whose attention is most often of a type, in one sentence each.")
    page.end(DEFINITIONS, facts or {})
    return page


def claim_table(
    claims: Mapping[str, Mapping[str, Any]], not_judged: Mapping[str, str]
) -> tuple[list[str], list[list]]:
    """Header and rows: what the paper says, whether it holds or why that is not judged, and the metrics."""
    rows = [
        [
            CLAIMS[name],
            ANSWERS.get(claim["holds"]) or f"not judged: {not_judged[name]}",
            "; ".join(
                f"{key.replace('_', ' ')}: {'–' if value is None else format(value, '.2f')}"
                for key, value in claim.items()
                if key != "holds"
            ),
        ]
        for name, claim in claims.items()
    ]
    return ["claim", "holds", "metrics"], rows
