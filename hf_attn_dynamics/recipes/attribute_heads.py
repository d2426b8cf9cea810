# Licensed under the Apache License, Version 2.0.
"""What really reaches each attention head: Hidden Token Attribution (Pascal, Brunner & Wattenhofer 2021) of a model.

    accelerate launch recipes/attribute_heads.py                    # a demonstration on a model that is trained first
    accelerate launch recipes/attribute_heads.py --model bert-base-uncased --data mnli/validation_matched.jsonl \\
        --text_column premise --text_pair_column hypothesis --max_sentences 4000
    accelerate launch recipes/attribute_heads.py --model bert-base-uncased --data … --output_dir runs/mine --resume

Of every head, attention is compared with the contribution of the layer's inputs (local) and of the model's input
(global) to what the head gives out. As in the paper, pairs are read: of two columns of tables, or else of sentences
that follow each other; and texts of 6 to 64 tokens count. Models may be encoders or decoders; of encoder–decoder
models, the encoder is read. A folder with a `vocab.json` of characters and no other file of a tokenizer is read
character by character.

Several processes share the batches. After every `save_every` batches of each process, the sums so far are written;
with `--resume`, a stopped run goes on from there, to the same figures; also one that was stopped while the model of
the demonstration was trained.

Writes to `--output_dir`: `report.html`, a page to read; `heads.csv`, a row for each head; `summary.json`; pictures
(PNG and SVG); `config.yaml` (the values of the run); `findings.json`, all that was measured, which
`AttributionFindings.load` reads; `results/NAME.json`, its parts, which their classes load.

Keys of `summary.json`:
    sentences, tokens         what was read; a pair is one sentence
    too_short, too_long       what was left out
    identifiable              sentences that have no more tokens than heads have dimensions
    layers, heads
    method                    of the global contributions: exact or probes
    pearson, spearman         mean over heads of the correlation of attention with `local` and `global` contributions,
                              and of `value_weighted` attention ‖a·v‖ with local contributions, as a check
    claims                    what the paper says of BERT: the metrics here, and whether it `holds`; null if not judged
    claims_not_judged         claims that are not judged, and why
    seconds                   of measuring
    model, num_processes, and seed, device, command and versions

`AttributionFindings.claims` in `hf_attn_dynamics/analysis/attribution/claims.py` has the criterion of each claim.
Fewer than 20 texts judge none.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
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
from .._refusals import refuse_bad_input
from .._tables import format_table
from ..analysis.attribution.claims import COMPARED, MAPS, AttributionFindings, Sums
from ..analysis.attribution.claims_page import claim_table, page_of
from ..analysis.attribution.statistics import MAP_TYPES
from ..analysis.attribution.trace import reader_of
from ..analysis.plots.attribution import MapExample
from ..analysis.sentences import Sentences
from ..data.tables import check_strings, column_of_flag, find_tables, open_table
from ..models.head_roles import locate_heads
from .arguments.attribute_heads import WIDE, AttributeArguments
from .arguments.base import refuse_flags
from .reading import load_model, load_sentences, page_facts
from .run import (
    NOT_OF_THE_RUN,
    SUMMARY,
    begin_run,
    check_output_dir,
    device_name,
    provenance,
    run_recipe,
    start_processes,
    write_csv,
    write_json,
)


REPORT, FINDINGS = "report.html", "findings.json"
SUMS = Path("checkpoints") / "sums.json"
EXAMPLES, EXAMPLE_LENGTH = 8, 24  # sentences among which examples are sought, and about how long they are


# ---------------------------------------------------------------------------------------------------------------------
# Sentences
# ---------------------------------------------------------------------------------------------------------------------


def read_texts(args: AttributeArguments) -> list[str] | list[tuple[str, str]]:
    """Sentences, or pairs: of two columns, or of those that follow each other."""
    if args.text_pair_column is not None:
        return read_pairs(args)
    trees, texts = load_sentences(args)
    sentences = [*(tree.text for tree in trees), *texts]
    if not args.pairs:
        return sentences
    if len(sentences) < 2:
        raise ValueError("data: there is one sentence only, which makes no pair; use --pairs false.")
    return list(zip(sentences[::2], sentences[1::2]))


def read_pairs(args: AttributeArguments) -> list[tuple[str, str]]:
    """Pairs from two columns of tables; rows with a blank cell are left out."""
    pairs: list[tuple[str, str]] = []
    columns = [(name, column_of_flag(getattr(args, name))) for name in ("text_column", "text_pair_column")]
    for path in find_tables(args.data):
        table = open_table(path, has_header=not any(isinstance(column, int) for _, column in columns), skip_torn=True)
        sides = [table.cells(name, column) for name, column in columns]
        for (name, column), cells in zip(columns, sides):
            check_strings(name, column, table.origin, cells)
        pairs += [pair for pair in zip(*sides) if all(text.strip() for text in pair)]
    return pairs[: args.max_sentences]


def segments_of(ids: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Number of the sentence of each token, a separator belonging to the one that it ends, `(batch, length)`."""
    if tokenizer.sep_token_id is None:
        return torch.zeros_like(ids)
    ends = ids.eq(tokenizer.sep_token_id).long()
    return ends.cumsum(-1) - ends


def with_segments(
    batch: dict[str, torch.Tensor], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A batch, with its segments for models that embed them, and the segments."""
    segments = segments_of(batch["input_ids"], tokenizer)
    types = getattr(model.config, "type_vocab_size", None) or 0
    return ({**batch, "token_type_ids": segments.clamp(max=types - 1)} if types > 1 else batch), segments


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """How maps are computed, and what is summed up of them.

    Args:
        model, tokenizer: What is looked at.
        limit: Largest offset of histograms by relative position.
        settings: Of `global_contribution`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    limit: int
    settings: dict[str, Any]

    @property
    def kind(self) -> str:
        """Kind of site whose heads are looked at."""
        return locate_heads(reader_of(self.model))[0].site.kind

    def maps(
        self, batch: dict[str, torch.Tensor], on_sentence: Callable[[], Any] | None = None
    ) -> dict[str, torch.Tensor]:
        """All maps of a batch, each `(layers, batch, heads, query, key)`."""
        return {
            "attention": attention_maps(self.model, batch)[self.kind],
            "value_weighted": value_weighted_attention(self.model, batch),
            "local": local_contribution(self.model, batch),
            "global": global_contribution(self.model, batch, on_sentence=on_sentence, **self.settings),
        }

    def sums(self, batch: dict[str, torch.Tensor], on_sentence: Callable[[], Any] | None = None) -> Sums:
        """Sums over the rows, offsets and maps of a batch, which those of other batches are added to."""
        batch, segments = with_segments(batch, self.model, self.tokenizer)
        maps = self.maps(batch, on_sentence)
        types = (map_types(maps[name], segments) for name in ("attention", "global"))
        return {**self._correlations(maps), **self._positions(batch, maps), "types": counts_of(*types)}

    def _correlations(self, maps: dict[str, torch.Tensor]) -> Sums:
        sums = {}
        for name, (one, two) in COMPARED.items():
            found = correlate(maps[one], maps[two], causal=self.kind == "decoder", kind=self.kind)
            rows = sums[f"{name}.rows"] = found.rows[self.kind]
            sums[f"{name}.constant"] = found.constant[self.kind]
            for measure in ("pearson", "spearman"):
                # Heads without a row have no mean.
                sums[f"{name}.{measure}"] = getattr(found, measure)[self.kind].nan_to_num() * rows
        return sums

    def _positions(self, batch: dict[str, torch.Tensor], maps: dict[str, torch.Tensor]) -> Sums:
        lengths = batch["attention_mask"].sum(-1)
        distances = torch.arange(-self.limit, self.limit + 1).abs()
        occurrences = (lengths[:, None] - distances).clamp(min=0).sum(0).double()
        sums = {"occurrences": occurrences, "tokens": lengths.sum().double()}
        for name in MAPS:
            positions = RelativePositions(self.limit, excluded_ids=[])
            show_maps(self.model, batch, maps[name], positions)
            found = positions.compute()
            # Offsets that did not occur add nothing; removed heads stay NaN.
            sums[f"{name}.attention"] = (found.attention[self.kind] * occurrences).where(occurrences > 0, 0)
            sums[f"{name}.largest"] = found.largest[self.kind] * sums["tokens"]
        return sums


def counts_of(types: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Numbers of maps by their types in two respects, `(layers, heads, types, types)`, float64."""
    codes = (types * len(MAP_TYPES) + others).clamp(min=0)
    counts = torch.nn.functional.one_hot(codes, len(MAP_TYPES) ** 2) * (types >= 0)[..., None]
    return counts.sum(1).unflatten(-1, (len(MAP_TYPES), len(MAP_TYPES))).double().cpu()


def added(parts: list[Sums]) -> Sums:
    """Sums of several sets of batches together."""
    parts = [part for part in parts if part]
    return {name: sum(part[name] for part in parts) for name in parts[0]} if parts else {}


def measure(
    args: AttributeArguments, measurement: Measurement, batches: list[dict], folder: Path, state: PartialState
) -> tuple[Sums, float]:
    """Sums over all batches, which the processes share, and seconds; goes on from the sums that are in the folder."""
    done, seconds, sums = read_sums(folder / SUMS)
    # All have read before the first one writes.
    state.wait_for_everyone()
    step = args.save_every * state.num_processes
    hidden = args.disable_tqdm or not state.is_main_process
    sizes = [len(batch["input_ids"]) for batch in batches]
    with tqdm(total=sum(sizes), initial=sum(sizes[:done]), desc="texts", disable=hidden) as progress:
        for start in range(done, len(batches), step):
            begin = time.perf_counter()
            share = batches[start : start + step]
            own = added(
                [
                    measurement.sums(batch, progress.update)
                    for batch in share[state.process_index :: state.num_processes]
                ]
            )
            sums = added([sums, *gather_object([own])])
            seconds += time.perf_counter() - begin
            if state.is_main_process:
                numbers = {name: table.tolist() for name, table in sums.items()}
                write_json(folder / SUMS, {"batches": start + len(share), "seconds": seconds, "sums": numbers})
            # The other processes have read texts, too.
            progress.update(sum(sizes[: start + len(share)]) - progress.n)
    return sums, seconds


def read_sums(path: Path) -> tuple[int, float, Sums]:
    """Number of batches, seconds and sums that an earlier, stopped run has left."""
    if not path.is_file():
        return 0, 0.0, {}
    saved = json.loads(path.read_text(encoding="utf-8"))
    sums = {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in saved["sums"].items()}
    return saved["batches"], saved["seconds"], sums


def examples_of(findings: AttributionFindings, measurement: Measurement, sentences: Sentences) -> list[MapExample]:
    """For each type of map, the head whose attention is of this type most often, in a sentence in which it is."""
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
            examples.append(MapExample(f"{name}\nlayer {layer}, head {head}", *shown))
    return examples


# ---------------------------------------------------------------------------------------------------------------------


def main(args: AttributeArguments) -> dict:
    """Run the recipe; returns what it wrote to `summary.json`."""
    state = start_processes()
    with refuse_bad_input():
        values = {key: value for key, value in asdict(args).items() if key not in NOT_OF_THE_RUN}
        folder = check_output_dir(args.output_dir, values, args.resume)
        texts = read_texts(args)
        args.use_threads()
        # All have looked into the folder before the first one writes.
        state.wait_for_everyone()
        if state.is_main_process and args.model is None:
            begin_run(folder, values)  # a model that is trained here can be gone on with
        model, tokenizer = load_model(args)
        model.to(state.device)
        if args.pairs and tokenizer.sep_token_id is None:
            raise ValueError(f"pairs: the tokenizer of {args.model!r} has no separator; use --pairs false.")
        sentences = Sentences(texts, model, tokenizer, args.min_length, args.max_length, name="data")
        wide = reader_of(model).config.hidden_size > WIDE
        method = ("probes" if wide else "exact") if args.method == "auto" else args.method
        if method == "exact":
            refuse_flags(args, {"probes": "contributions to this model are computed exactly; use --method probes"})
        settings = {"method": method, "probes": args.probes, "chunk_size": args.chunk_size, "seed": args.seed}
        measurement = Measurement(model, tokenizer, args.max_length - 1, settings)
        # Whether this model can be measured in this way, one short sentence tells.
        measurement.sums(sentences.padded([min(sentences.ids, key=len)]))
        state.wait_for_everyone()
        if state.is_main_process:
            begin_run(folder, values)
    sums, seconds = measure(args, measurement, list(sentences.batches(args.batch_size)), folder, state)
    if state.is_main_process:
        findings = AttributionFindings.of(sums, measurement.kind)
        head_size = locate_heads(reader_of(model))[0].head_dim
        summary = {
            "model": args.model_name,
            "sentences": len(sentences.ids),
            "tokens": sentences.num_tokens,
            "too_short": sentences.too_short,
            "too_long": sentences.too_long,
            "identifiable": sum(len(ids) <= head_size for ids in sentences.ids),
            "layers": len(findings.types),
            "heads": int(findings.types.any(-1).any(-1).sum()),
            "method": method,
            **{
                measure: {name: getattr(found, measure).mean() for name, found in findings.correlations.items()}
                for measure in ("pearson", "spearman")
            },
            "claims": findings.claims(),
            "claims_not_judged": findings.not_judged(),
            "seconds": seconds,
            "num_processes": state.num_processes,
            **provenance(args.seed, device_name(state)),
        }
        findings.save(folder / FINDINGS)
        findings.save_parts(folder / "results")
        write_csv(folder / "heads.csv", findings.rows())
        examples = examples_of(findings, measurement, sentences)
        page_of(findings, summary, examples, page_facts(summary), pictures=folder).save(folder / REPORT)
        write_json(folder / SUMMARY, summary)
        print_summary(summary, folder)
    state.wait_for_everyone()
    return json.loads((folder / SUMMARY).read_text(encoding="utf-8"))


def print_summary(summary: dict[str, Any], folder: Path) -> None:
    header, rows = claim_table(summary["claims"], summary["claims_not_judged"])
    print("\n" + format_table(header[:2], [row[:2] for row in rows]))
    print(f"\n{summary['sentences']:,} texts read, {summary['too_short'] + summary['too_long']:,} left out.")
    print(f"Everything is in {folder}: {REPORT}, heads.csv, {SUMMARY}, pictures, results/.")


if __name__ == "__main__":
    run_recipe(main)
