# Licensed under the Apache License, Version 2.0.
"""Attribute the output of each attention head to the input: Hidden Token Attribution (Pascal et al. 2021).

    accelerate launch recipes/attribute_heads.py                    # a demonstration on a model that is trained first
    accelerate launch recipes/attribute_heads.py --model bert-base-uncased --data mnli/validation_matched.jsonl \\
        --text_column premise --text_pair_column hypothesis --max_examples 4000
    accelerate launch recipes/attribute_heads.py --model bert-base-uncased --data … --output_dir runs/mine --resume

The recipe compares the attention of every head with the contributions of the layer's inputs (local) and of the model's
input (global) to the head's output. As in the paper, it reads pairs of sentences with 6 to 64 tokens, from two columns
of tables or from consecutive sentences. Centers of mass of attention are also given between tokens that are not
special: attention to `[CLS]` and `[SEP]` outweighs all else in some models. Encoders and decoders are supported; of an
encoder–decoder model, the encoder is read. If the only tokenizer file of a checkpoint is a `vocab.json` of characters,
text is read by character.

Each metric of the claims of the paper has a 95 % interval from a bootstrap over texts: 1,000 times, as many texts as
there are, drawn with replacement; of more than 200 texts, 200 groups of consecutive texts are drawn. A claim is judged
if at least 95 % of these resamples agree about it.

Batches are distributed over processes. The sums are saved after every `save_every` batches per process. With
`--resume`, a stopped run continues from there, with the same results, also if it was training the demonstration model.

Writes to `--output_dir`: `report.html`; `heads.csv`, a row per head; `summary.json`; pictures (PNG and SVG);
`config.yaml`, the values of the run; `findings.json`, all results, which `AttributionFindings.load` reads;
`results/NAME.json`, each result by itself, which its class loads.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from safetensors import safe_open
from safetensors.torch import save
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import (
    RelativePositions,
    attention_maps,
    correlate,
    global_contribution,
    local_contribution,
    map_types,
    show_maps,
    value_weighted_attention,
)
from .._files import write_bytes
from .._tables import format_table
from ..analysis.attribution.claims import (
    BETWEEN_WORDS,
    CLAIM_SUMS,
    COMPARED,
    MAPS,
    NOT_METRICS,
    AttributionFindings,
    attribution_drawings,
    claim_table,
)
from ..analysis.attribution.resampling import Sums, TextGroups
from ..analysis.attribution.statistics import MAP_TYPES
from ..analysis.plots.attribution import MapExample
from ..analysis.running import reader_of
from ..analysis.sentence_maps import Measures, SentenceMaps, collect_maps
from ..analysis.sentences import Sentences, batches_by_length
from ..data.tables import check_strings, column_of_flag, find_tables, open_table
from ..models.head_roles import locate_heads
from .arguments.attribute_heads import WIDE, AttributeArguments
from .arguments.base import refuse_flags
from .attribution_page import attribution_page, name_of
from .pictures import keep_all
from .reading import load_model, load_sentences, page_facts
from .run import SUMMARY, Run, run_recipe, write_csv
from .summaries.attribute_heads import AttributeSummary, ClaimResult


REPORT, FINDINGS = "report.html", "findings.json"
SUMS = Path("checkpoints") / "sums.safetensors"
EXAMPLES, EXAMPLE_LENGTH = (
    8,
    24,
)  # number of texts in examples and on the page; length of the former


def read_texts(args: AttributeArguments) -> list[str] | list[tuple[str, str]]:
    """Sentences, or pairs of sentences: from two columns, or consecutive ones."""
    if args.text_pair_column is not None:
        return read_pairs(args)
    trees, texts = load_sentences(args)
    sentences = [*(tree.text for tree in trees), *texts]
    if not args.pairs:
        return sentences
    if len(sentences) < 2:
        raise ValueError("data: pairs need at least two sentences, got one; use --pairs false.")
    return list(zip(sentences[::2], sentences[1::2]))


def read_pairs(args: AttributeArguments) -> list[tuple[str, str]]:
    """Pairs from two columns of tables; rows with a blank cell are skipped."""
    pairs: list[tuple[str, str]] = []
    columns = [(name, column_of_flag(getattr(args, name))) for name in ("text_column", "text_pair_column")]
    for path in find_tables(args.data):
        table = open_table(path, has_header=not any(isinstance(column, int) for _, column in columns), skip_torn=True)
        sides = [table.cells(name, column) for name, column in columns]
        for (name, column), cells in zip(columns, sides):
            check_strings(name, column, table.origin, cells)
        pairs += [pair for pair in zip(*sides) if all(text.strip() for text in pair)]
    return pairs[: args.max_examples]


def segments_of(ids: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Index of the sentence of each token, `(batch, length)`; a separator belongs to the sentence that it ends."""
    if tokenizer.sep_token_id is None:
        return torch.zeros_like(ids)
    ends = ids.eq(tokenizer.sep_token_id).long()
    return ends.cumsum(-1) - ends


def with_segments(
    batch: dict[str, torch.Tensor], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A batch, with token types if the model embeds them, and the index of the sentence of each token."""
    segments = segments_of(batch["input_ids"], tokenizer)
    types = getattr(model.config, "type_vocab_size", None) or 0
    return ({**batch, "token_type_ids": segments.clamp(max=types - 1)} if types > 1 else batch), segments


@dataclass(frozen=True)
class Measurement:
    """Computes maps of batches, and sums over them.

    Args:
        model (`PreTrainedModel`): Model to read.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        limit (`int`): Largest offset of histograms by relative position.
        norm (`str`): Norm of the contributions.
        settings (`dict`): Further arguments of `global_contribution`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    limit: int
    norm: str
    settings: dict[str, Any]

    @property
    def kind(self) -> str:
        """Kind of site of the heads: encoder or decoder."""
        return locate_heads(reader_of(self.model))[0].site.kind

    def maps(
        self, batch: dict[str, torch.Tensor], on_sentence: Callable[[], Any] | None = None
    ) -> dict[str, torch.Tensor]:
        """All maps of a batch, each `(layers, batch, heads, query, key)`."""
        maps = {
            "attention": attention_maps(self.model, batch)[self.kind],
            "value_weighted": value_weighted_attention(self.model, batch),
            "local": local_contribution(self.model, batch, norm=self.norm),
            "global": global_contribution(self.model, batch, norm=self.norm, on_sentence=on_sentence, **self.settings),
        }
        # Batches are on the CPU, where statistics are computed.
        return {name: table.cpu() for name, table in maps.items()}

    def sums(
        self, batch: dict[str, torch.Tensor], on_sentence: Callable[[], Any] | None = None
    ) -> tuple[Sums, list[Sums]]:
        """Sums over the rows, offsets and maps of a batch, and those of each text that the claims are about."""
        batch, segments = with_segments(batch, self.model, self.tokenizer)
        maps = self.maps(batch, on_sentence)
        types = [map_types(maps[name], segments) for name in ("attention", "global")]
        texts = []
        for text, length in enumerate(batch["attention_mask"].sum(-1).tolist()):
            one, real = slice(text, text + 1), slice(length)
            sums = self._sums(
                {name: table[one, real] for name, table in batch.items()},
                {name: table[:, one, :, real, real] for name, table in maps.items()},
                [table[:, one] for table in types],
            )
            texts.append({name: sums[name] for name in CLAIM_SUMS})
        return self._sums(batch, maps, types), texts

    def _sums(
        self, batch: dict[str, torch.Tensor], maps: dict[str, torch.Tensor], types: Sequence[torch.Tensor]
    ) -> Sums:
        return {
            **self._correlations(maps),
            **self._positions(batch, maps),
            **self._between_words(batch, maps["attention"]),
            "types": counts_of(*types),
        }

    def _correlations(self, maps: dict[str, torch.Tensor]) -> Sums:
        sums = {}
        for name, (one, two) in COMPARED.items():
            found = correlate(maps[one], maps[two], causal=self.kind == "decoder", kind=self.kind)
            rows = sums[f"{name}.rows"] = found.rows[self.kind]
            sums[f"{name}.constant"] = found.constant[self.kind]
            for measure in ("pearson", "spearman"):
                # The mean of a head without rows is NaN.
                sums[f"{name}.{measure}"] = getattr(found, measure)[self.kind].nan_to_num() * rows
        return sums

    def _positions(self, batch: dict[str, torch.Tensor], maps: dict[str, torch.Tensor]) -> Sums:
        lengths = batch["attention_mask"].sum(-1)
        distances = torch.arange(-self.limit, self.limit + 1).abs()
        occurrences = (lengths[:, None] - distances).clamp(min=0).sum(0).double()
        sums = {"occurrences": occurrences, "tokens": lengths.sum().double()}
        for name in MAPS:
            positions = RelativePositions(self.limit, excluded_ids=[])
            show_maps(self.model, batch, maps[name], positions, kind=self.kind)
            found = positions.compute()
            # Offsets that do not occur contribute zero; removed heads stay NaN.
            sums[f"{name}.attention"] = (found.attention[self.kind] * occurrences).where(occurrences > 0, 0)
            sums[f"{name}.largest"] = found.largest[self.kind] * sums["tokens"]
        return sums

    def _between_words(self, batch: dict[str, torch.Tensor], attention: torch.Tensor) -> Sums:
        """Sums by relative position of the attention between tokens that are not special.

        The weights of a query are divided by their sum over these tokens.
        """
        ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        words = mask & ~torch.isin(ids, ids.new_tensor(self.tokenizer.all_special_ids))
        pairs = words[:, :, None] & words[:, None]
        weights = attention.where(pairs[:, None], 0).double()
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(attention.dtype).tiny)
        places = torch.arange(ids.shape[1], device=ids.device)
        offsets = (places - places[:, None] + self.limit).flatten()
        size = 2 * self.limit + 1
        sums = weights.new_zeros(*weights.shape[:1], weights.shape[2], size)
        sums.index_add_(-1, offsets, weights.sum(1).flatten(-2))
        occurrences = weights.new_zeros(size).index_add_(0, offsets, pairs.sum(0).flatten().double())
        return {f"{BETWEEN_WORDS}.attention": sums.cpu(), f"{BETWEEN_WORDS}.occurrences": occurrences.cpu()}


def counts_of(types: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Contingency table of two types per map, `(layers, heads, types, types)`, float64."""
    codes = (types * len(MAP_TYPES) + others).clamp(min=0)
    counts = torch.nn.functional.one_hot(codes, len(MAP_TYPES) ** 2) * (types >= 0)[..., None]
    return counts.sum(1).unflatten(-1, (len(MAP_TYPES), len(MAP_TYPES))).double().cpu()


def added(parts: list[Sums]) -> Sums:
    """Adds the sums of several sets of batches."""
    parts = [part for part in parts if part]
    return {name: sum(part[name] for part in parts) for name in parts[0]} if parts else {}


def measure(
    args: AttributeArguments, measurement: Measurement, sentences: Sentences, folder: Path, state: PartialState
) -> tuple[Sums, TextGroups, float]:
    """Sums over all texts and over groups of them, distributed over processes, and seconds.

    Continues from the sums in the folder.
    """
    done, seconds, sums, groups = read_sums(folder / SUMS, len(sentences.ids))
    # No process reads after the first one writes.
    state.wait_for_everyone()
    # Indices of the texts of each batch.
    batches = batches_by_length(
        range(len(sentences.ids)), args.batch_size, length=lambda text: len(sentences.ids[text])
    )
    step = args.save_every * state.num_processes
    hidden = args.disable_tqdm or not state.is_main_process
    sizes = list(map(len, batches))
    with tqdm(total=sum(sizes), initial=sum(sizes[:done]), desc="texts", disable=hidden) as progress:
        for start in range(done, len(batches), step):
            begin = time.perf_counter()
            chunk = batches[start : start + step]
            own, own_texts = [], []
            for texts in chunk[state.process_index :: state.num_processes]:
                found, by_text = measurement.sums(
                    sentences.padded(sentences.ids[text] for text in texts), progress.update
                )
                own.append(found)
                own_texts += zip(texts, by_text)
            gathered = gather_object([(added(own), own_texts)])
            sums = added([sums, *(found for found, _ in gathered)])
            for text, found in (pair for _, pairs in gathered for pair in pairs):
                groups.add(text, found)
            seconds += time.perf_counter() - begin
            if state.is_main_process:
                write_sums(folder / SUMS, start + len(chunk), seconds, sums, groups)
            # Count the texts of the other processes.
            progress.update(sum(sizes[: start + len(chunk)]) - progress.n)
    return sums, groups, seconds


ALL, GROUPS = "all/", "groups/"  # prefixes of the sums of all texts, and of groups of texts


def write_sums(path: Path, batches: int, seconds: float, sums: Sums, groups: TextGroups) -> None:
    """Writes the sums over a number of batches, and the seconds that they took."""
    tables = {ALL: sums, GROUPS: groups.sums}
    named = {prefix + name: table.contiguous() for prefix, part in tables.items() for name, table in part.items()}
    write_bytes(path, save(named, {"batches": str(batches), "seconds": repr(seconds)}))


def read_sums(path: Path, texts: int) -> tuple[int, float, Sums, TextGroups]:
    """Number of batches, seconds and sums that a stopped run on this number of texts has saved."""
    if not path.is_file():
        return 0, 0.0, {}, TextGroups(texts, CLAIM_SUMS)
    with safe_open(path, framework="pt") as file:
        saved, tables = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    sums, groups = (
        {name.removeprefix(prefix): table for name, table in tables.items() if name.startswith(prefix)}
        for prefix in (ALL, GROUPS)
    )
    return int(saved["batches"]), float(saved["seconds"]), sums, TextGroups(texts, CLAIM_SUMS, groups)


def examples_of(findings: AttributionFindings, measurement: Measurement, sentences: Sentences) -> list[MapExample]:
    """For each type of map, a sentence with the head whose attention has this type most often."""
    rows = sorted(sentences.ids, key=lambda ids: abs(len(ids) - EXAMPLE_LENGTH))[:EXAMPLES]
    batch, segments = with_segments(sentences.padded(rows), measurement.model, measurement.tokenizer)
    maps = measurement.maps(batch)
    found, counts = map_types(maps["attention"], segments), findings.type_counts("attention")
    examples = []
    for number, name in enumerate(MAP_TYPES):
        places = (found == number).nonzero().tolist()
        if places:
            layer, sentence, head = max(places, key=lambda place: counts[place[0], place[2], number])
            tokens = batch["attention_mask"][sentence].nonzero().flatten()
            shown = (maps[kind][layer, sentence, head].cpu()[tokens][:, tokens] for kind in ("attention", "global"))
            words = measurement.tokenizer.convert_ids_to_tokens(batch["input_ids"][sentence][tokens].tolist())
            examples.append(MapExample(f"{name}\nlayer {layer}, head {head}", *shown, words))
    return examples


def texts_of_page(measurement: Measurement, sentences: Sentences) -> list[SentenceMaps]:
    """Attention and contributions in some texts, for the page."""

    def weights_of(ids: list[int]) -> Measures:
        batch, _ = with_segments(sentences.padded([ids]), measurement.model, measurement.tokenizer)
        return {name: {measurement.kind: table[:, 0]} for name, table in measurement.maps(batch).items()}

    return collect_maps(measurement.model, sentences, weights_of, most=EXAMPLES)


def main(args: AttributeArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    run = Run(args)
    with run.preparing():
        texts = read_texts(args)
        if args.model is None:
            run.claim()  # the model of the demonstration is trained in the folder
        model, tokenizer = load_model(args)
        if args.pairs and tokenizer.sep_token_id is None:
            raise ValueError(f"pairs: the tokenizer of {args.model!r} has no separator; use --pairs false.")
        sentences = Sentences(texts, model, tokenizer, args.min_length, args.max_length, name="data")
        settings = contribution_settings(args, model)
        model = model.to(run.state.device)
        measurement = Measurement(model, tokenizer, args.max_length - 1, args.norm, settings)
        # A short text shows whether the method supports the model.
        measurement.sums(sentences.padded([min(sentences.ids, key=len)]))
    sums, groups, seconds = measure(args, measurement, sentences, run.folder, run.state)
    findings = AttributionFindings.of(sums, measurement.kind, groups)
    head_size = locate_heads(reader_of(model))[0].head_dim
    summary = AttributeSummary(
        model=args.model_name,
        sentences=len(sentences.ids),
        tokens=sentences.num_tokens,
        too_short=sentences.too_short,
        too_long=sentences.too_long,
        identifiable=sum(len(ids) <= head_size for ids in sentences.ids),
        layers=len(findings.types),
        heads=int(findings.types.any(-1).any(-1).sum()),
        method=settings["method"],
        norm=args.norm,
        pearson={name: found.pearson.mean() for name, found in findings.correlations.items()},
        spearman={name: found.spearman.mean() for name, found in findings.correlations.items()},
        claims={name: claim_result(claim) for name, claim in findings.claims().items()},
        claims_not_judged=findings.not_judged(),
        seconds=seconds,
    )
    return run.finish(
        summary,
        lambda: publish(findings, measurement, sentences, summary, run.folder),
        lambda: print_report(findings, summary, run.folder),
    )


def claim_result(claim: Mapping[str, Any]) -> ClaimResult:
    """A row of the summary from the results of a claim."""
    metrics = {name: value for name, value in claim.items() if name not in NOT_METRICS}
    return ClaimResult(
        holds=claim["holds"], holds_in=claim.get("holds_in"), metrics=metrics, intervals=claim.get("intervals")
    )


def contribution_settings(args: AttributeArguments, model: PreTrainedModel) -> dict[str, Any]:
    """Arguments of `global_contribution`."""
    is_estimated = reader_of(model).config.hidden_size > WIDE and args.norm != "spectral"
    method = ("probes" if is_estimated else "exact") if args.method == "auto" else args.method
    if args.norm == "spectral" and method == "probes":
        raise ValueError(
            "norm spectral needs whole Jacobians, of which probes are only some directions; use --method exact or "
            "--norm frobenius."
        )
    if method == "exact":
        refuse_flags(args, {"probes": "contributions to this model are computed exactly; use --method probes"})
    return {"method": method, "probes": args.probes, "chunk_size": args.chunk_size, "seed": args.seed}


def publish(
    findings: AttributionFindings,
    measurement: Measurement,
    sentences: Sentences,
    summary: AttributeSummary,
    folder: Path,
) -> None:
    """Writes the report, the pictures, and the tables."""
    findings.save(folder / FINDINGS)
    findings.save_parts(folder / "results")
    write_csv(folder / "heads.csv", findings.rows())
    examples, maps = examples_of(findings, measurement, sentences), texts_of_page(measurement, sentences)
    facts = page_facts(summary.provenance)
    page = attribution_page(findings, summary.to_dict(), examples, maps, facts, pictures=folder)
    page.save(folder / REPORT)
    keep_all(attribution_drawings(findings, examples, name_of(summary.to_dict())), folder)


def print_report(findings: AttributionFindings, summary: AttributeSummary, folder: Path) -> None:
    header, rows = claim_table(findings.claims(), findings.not_judged())
    print("\n" + format_table(header[:3], [row[:3] for row in rows]))
    print(f"\n{summary.sentences:,} texts read, {summary.too_short + summary.too_long:,} left out.")
    print(f"Everything is in {folder}: {REPORT}, heads.csv, {SUMMARY}, pictures, results/.")


if __name__ == "__main__":
    run_recipe(main, summary=AttributeSummary)
