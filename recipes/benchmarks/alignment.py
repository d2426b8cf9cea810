# Licensed under the Apache License, Version 2.0.
"""How fast IBM Model 1 is, beside NLTK's and eflomal, and which alignments they find.

    python recipes/benchmarks/alignment.py --source_file train.en.gz --target_file train.de.gz
    python recipes/benchmarks/alignment.py --peer_python ~/nltk/bin/python --output_dir runs/alignment

Without files, the sentences are random translations, word by word, of a vocabulary with Zipf's frequencies. Words are
what white space separates, in lower case.

Systems take turns, each in a process of its own with `--cpu_threads`; fitting and aligning are timed, reading the
sentences is not:
    package   `IbmModel1().fit(pairs, iterations)` and `.align(pairs)`
    once      the same with `count_repeats=False`: the model that NLTK fits
    diagonal  the same as `package` with `prior=DiagonalPrior()`
    both      `align_both_directions(pairs, "grow-diag", iterations, prior=DiagonalPrior())`
    nltk      `nltk.translate.IBMModel1`, which does both
    eflomal   `eflomal.Aligner` with model 1, which samples, and both directions
    eflomal_1 `eflomal.Aligner` with one iteration of each of its models 1 to 3 and one sampler, and both directions

NLTK and eflomal are no dependencies: `--peer_python` names an interpreter that has them, by default this one. A system
that cannot be imported is left out, with the reason. Figures are medians over rounds; ratios are medians of the ratio
within a round, of CPU seconds of the process and its children.

The reference of alignment error rates is `eflomal.Aligner` with its default settings, whose alignments of both
directions have sure links in common; all others are possible. Its runs are not timed. This is a silver standard: it
favours systems that err as eflomal does.

Keys of `summary.json`: `seconds_X` and `cpu_seconds_X` for each system, `pairs_per_cpu_second_X`,
`cpu_time_X_to_package`, `same_links_X`, the F1 of the links of X and those of the package (`once` if X is `nltk`),
`aer_X`, the alignment error rate, null without eflomal, and the settings.
"""

import json
import random
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarking import BenchmarkArguments, run_python, write_summary

from hf_attn_dynamics import alignment_error_rate, read_pharaoh
from hf_attn_dynamics._refusals import refuse_bad_input
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.data import load_parallel
from hf_attn_dynamics.recipes.arguments.base import flag
from hf_attn_dynamics.recipes.run import run_recipe


# Each gets a file of pairs, the number of iterations and where to put Pharaoh lines; it prints wall and CPU seconds.
PREAMBLE = """
import json, resource, sys, time
with open(sys.argv[1], encoding="utf-8") as file:
    pairs = [tuple(pair) for pair in json.load(file)]
iterations, output = int(sys.argv[2]), sys.argv[3]
def cpu():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
def report(start, links):
    print(json.dumps([time.perf_counter() - start[0], cpu() - start[1]]))
    with open(output, "w") as file:
        file.writelines(" ".join(f"{i}-{j}" for i, j in line) + "\\n" for line in links)
"""
OURS = """
from hf_attn_dynamics import IbmModel1, align_both_directions
from hf_attn_dynamics.analysis import DiagonalPrior
start = time.perf_counter(), cpu()
report(start, {links})
"""
EFLOMAL = """
import eflomal, tempfile
sides = [[" ".join(side) + "\\n" for side in column] for column in zip(*pairs)]
forward, reverse = output + ".forward", output + ".reverse"
start = time.perf_counter(), cpu()
eflomal.Aligner({settings}).align(
    sides[0], sides[1], links_filename_fwd=forward, links_filename_rev=reverse, quiet=True
)
with open(forward) as file:
    links = [[tuple(map(int, link.split("-"))) for link in line.split()] for line in file]
report(start, links)
"""
SYSTEMS = {
    "package": OURS.format(links="IbmModel1().fit(pairs, iterations).align(pairs)"),
    "once": OURS.format(links="IbmModel1().fit(pairs, iterations, count_repeats=False).align(pairs)"),
    "diagonal": OURS.format(links="IbmModel1(prior=DiagonalPrior()).fit(pairs, iterations).align(pairs)"),
    "both": OURS.format(links='align_both_directions(pairs, "grow-diag", iterations, prior=DiagonalPrior())'),
    "nltk": """
from nltk.translate import AlignedSent, IBMModel1
corpus = [AlignedSent(target, source) for source, target in pairs]
start = time.perf_counter(), cpu()
IBMModel1(corpus, iterations)
report(start, [[(i, j) for j, i in pair.alignment if i is not None] for pair in corpus])
""",
    "eflomal": EFLOMAL.format(settings="model=1"),
    "eflomal_1": EFLOMAL.format(settings="n_iterations=(1, 1, 1), n_samplers=1"),
}
PEERS = ("nltk", "eflomal", "eflomal_1")
REFERENCE = EFLOMAL.format(settings="")


@dataclass
class AlignmentArguments(BenchmarkArguments):
    """Sentence pairs and iterations."""

    source_file: str | None = flag(None, "Text file with one sentence per line, optionally gzipped.")
    target_file: str | None = flag(None, "Translations of source_file, line by line.")
    max_pairs: int = flag(29000, "Maximum number of sentence pairs.")
    iterations: int = flag(5, "Iterations of expectation maximisation.")
    rounds: int = flag(3, "Number of measured turns of each system.")
    peer_python: str | None = flag(None, "Python interpreter that has NLTK and eflomal; this one by default.")

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "max_pairs", "iterations")
        if (self.source_file is None) != (self.target_file is None):
            raise ValueError("give source_file and target_file, or neither.")


def read_pairs(args: AlignmentArguments) -> list[tuple[list[str], list[str]]]:
    """Words of sentences and their translations."""
    if args.source_file is None:
        return invented_pairs(args.max_pairs, args.seed)
    rows = load_parallel(args.source_file, args.target_file).select_columns(["source", "target"])
    rows = rows.select(range(min(args.max_pairs, len(rows))))
    return [(row["source"].lower().split(), row["target"].lower().split()) for row in rows]


def invented_pairs(count: int, seed: int) -> list[tuple[list[str], list[str]]]:
    """Sentences of 6 to 18 of 10,000 words; translations leave a tenth out and are in another order."""
    draw = random.Random(seed)
    words = range(10_000)
    weights = [1 / (rank + 1) for rank in words]
    pairs = []
    for _ in range(count):
        sentence = draw.choices(words, weights, k=draw.randint(6, 18))
        translation = [word for word in sentence if draw.random() < 0.9] or sentence
        draw.shuffle(translation)
        pairs.append(([f"s{word}" for word in sentence], [f"t{word}" for word in translation]))
    return pairs


def run_system(name: str, args: AlignmentArguments, folder: Path) -> tuple[float, float]:
    """Wall and CPU seconds of one system; its links lie in the folder, in the Pharaoh format."""
    interpreter = args.peer_python if name in PEERS else None
    words = str(folder / "pairs.json"), str(args.iterations), str(folder / name)
    wall, cpu = json.loads(run_python(interpreter, PREAMBLE + SYSTEMS[name], *words, threads=args.cpu_threads))
    return wall, cpu


def error_rates(names: Iterable[str], args: AlignmentArguments, folder: Path) -> dict[str, float | None]:
    """Alignment error rates of systems, whose links lie in the folder; `None` without eflomal."""
    path = folder / "reference"
    try:
        run_python(
            args.peer_python,
            PREAMBLE + REFERENCE,
            str(folder / "pairs.json"),
            "1",
            str(path),
            threads=args.cpu_threads,
        )
    except (RuntimeError, OSError) as error:
        print(f"There is no reference: {error}")
        return dict.fromkeys(names)
    forward, reverse = (
        [set(links) for links in read_pharaoh(f"{path}.{direction}")] for direction in ("forward", "reverse")
    )
    sure = [one & other for one, other in zip(forward, reverse)]
    possible = [one | other for one, other in zip(forward, reverse)]
    return {name: alignment_error_rate(read_pharaoh(folder / name), sure, possible) for name in names}


def same_links(one: Path, other: Path) -> float:
    """F1 of two files of links."""
    first, second = (list(map(set, read_pharaoh(path))) for path in (one, other))
    shared = sum(len(a & b) for a, b in zip(first, second))
    return 2 * shared / sum(len(links) for links in first + second)


def main(args: AlignmentArguments) -> dict:
    """Runs the benchmark; returns the summary."""
    with refuse_bad_input():
        pairs = read_pairs(args)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in SYSTEMS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "pairs.json").write_text(json.dumps(pairs), encoding="utf-8")
        for _ in range(args.rounds):
            for name in list(seconds):
                try:
                    seconds[name].append(run_system(name, args, folder))
                except (RuntimeError, OSError) as error:
                    if name not in PEERS:
                        raise
                    print(f"{name} is left out: {error}")
                    del seconds[name]
        reference = {name: "once" if name == "nltk" else "package" for name in seconds}
        links = {name: same_links(folder / name, folder / reference[name]) for name in seconds}
        rates = error_rates(seconds, args, folder)
    results: dict = {}
    rows = []
    for name, turns in seconds.items():
        wall, cpu = (statistics.median(column) for column in zip(*turns))
        ratio = statistics.median(one[1] / other[1] for one, other in zip(turns, seconds["package"]))
        figures = {
            f"seconds_{name}": wall,
            f"cpu_seconds_{name}": cpu,
            f"pairs_per_cpu_second_{name}": len(pairs) / cpu,
            f"cpu_time_{name}_to_package": ratio,
            f"same_links_{name}": links[name],
            f"aer_{name}": rates[name],
        }
        results |= figures
        rows.append([name, *figures.values()])
    header = ["system", "wall (s)", "CPU (s)", "pairs / CPU s", "CPU time / package", "same links", "AER"]
    print(format_table(header, rows))
    return write_summary(args, {**results, "pairs": len(pairs)})


if __name__ == "__main__":
    run_recipe(main)
