# Licensed under the Apache License, Version 2.0.
"""Pictures of what analyses and runs return. Each function saves a PNG and, beside it, an SVG."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure


# Colour-blind safe (Okabe & Ito), one for each run in its order.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def _save(figure: Figure, path: str | Path) -> Path:
    path = Path(path).with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    # The text of an SVG stays text, and the same figure gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, dpi=150)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    return path


def _clean(axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3, linewidth=0.6)


def plot_pretraining(
    histories: dict[str, list[dict]],
    path: str | Path,
    title: str = "",
    unigram_entropy: float | None = None,
    crossing: tuple[int, float] | None = None,
) -> Path:
    """Losses of pretraining runs over their steps, and what guidance added.

    Args:
        histories (`dict[str, list[dict]]`): `trainer.state.log_history` of each run, by its name.
        path (`str` or `Path`): Where to save; the suffix becomes `.png`, and `.svg` for the second file.
        title (`str`): Title of the picture.
        unigram_entropy (`float`, *optional*): Entropy of the token frequencies in nats, at which a model stays that
            has learnt nothing but these; drawn as a line.
        crossing (`tuple[int, float]`, *optional*): Step and loss at which the first run reaches the end of the
            second; marked.

    Returns:
        `Path`: the PNG file.
    """
    guided = any("guidance_loss" in entry for history in histories.values() for entry in history)
    figure = Figure(figsize=(10.5 if guided else 6.5, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.7, 1]}) if guided else [figure.subplots()]
    losses = axes[0]
    for colour, (name, history) in zip(COLOURS, histories.items()):
        train = [(e["step"], e["task_loss"]) for e in history if "task_loss" in e]
        evaluation = [(e["step"], e["eval_loss"]) for e in history if "eval_loss" in e]
        losses.plot(*zip(*train), color=colour, alpha=0.3, linewidth=0.9)
        losses.plot(*zip(*evaluation), color=colour, linewidth=2, marker="o", markersize=3.5, label=name)
    if unigram_entropy is not None:
        losses.axhline(unigram_entropy, color="0.45", linestyle=":", linewidth=1.2, label="unigram entropy")
    if crossing is not None:
        step, loss = crossing
        label = f"end of the unguided run reached: step {step}"
        losses.plot([step], [loss], marker="*", markersize=13, color="black", linestyle="none", label=label)
    losses.set(xlabel="optimizer step", ylabel="masked-language-model loss (nats)")
    losses.set_title("evaluation (dots) and training (faint)", fontsize=10)
    losses.legend(frameon=False, fontsize=9)
    _clean(losses)
    if guided:
        history = next(h for h in histories.values() if any("guidance_loss" in e for e in h))
        steps, guidance, weights = zip(
            *((e["step"], e["guidance_loss"], e["guidance_weight"]) for e in history if "guidance_loss" in e)
        )
        axes[1].semilogy(steps, guidance, color=COLOURS[0], linewidth=2)
        axes[1].set(xlabel="optimizer step", ylabel="guidance loss (training)")
        axes[1].yaxis.label.set_color(COLOURS[0])
        axes[1].set_title("guidance", fontsize=10)
        _clean(axes[1])
        weight = axes[1].twinx()
        weight.plot(steps, weights, color="0.45", linestyle="--", linewidth=1.4)
        weight.set(ylabel="its weight α (dashed)", ylim=(0, None))
        weight.yaxis.label.set_color("0.45")
        weight.spines["top"].set_visible(False)
    if title:
        figure.suptitle(title, fontsize=11)
    return _save(figure, path)
