# Licensed under the Apache License, Version 2.0.
"""How fast IBM Model 1 is, beside NLTK's, and whether both find the same alignments.

    python recipes/benchmarks/alignment.py --source_file train.en.gz --target_file train.de.gz
    python recipes/benchmarks/alignment.py --peer_python ~/nltk/bin/python --output_dir runs/alignment

Without files, the sentences are random translations, word by word, of a vocabulary with Zipf's frequencies. Words are
what white space separates, in lower case.

Systems take turns, each in a process of its own with one thread; reading the sentences is not counted, fitting and
aligning are:
    package   `IbmModel1().fit(pairs, iterations)` and `.align(pairs)`
    once      the same with `count_repeats=False`: the model that NLTK fits
    nltk      `nltk.translate.IBMModel1`, which does both
    eflomal   `eflomal.Aligner` with model 1, which samples, and both directions

NLTK and eflomal are no dependencies: `--peer_python` names an interpreter that has them, by default this one. A system
that cannot be imported is left out, with the reason. Figures are medians over rounds; ratios are medians of the ratio
within a round, of CPU seconds of the process and its children.

Keys of `summary.json`: `seconds_X` and `cpu_seconds_X` for each system, `pairs_per_cpu_second_X`,
`cpu_time_X_to_package`, `same_links_X`, the F1 of the links of X and those of the package (`once` if X is `nltk`), and
the settings.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hf_attn_dynamics import read_pharaoh
from hf_attn_dynamics._refusals import refuse_bad_input
from hf_attn_dynamics._tables import format_table
from hf_attn_dynamics.data import load_parallel
from hf_attn_dynamics.recipes.run import SUMMARY, check_output_dir, provenance, run_recipe, write_json


# Each gets a file of pairs, the number of iterations and where to put Pharaoh lines; it prints wall and CPU seconds.
PREAMBLE = """
import json, os, sys, time
with open(sys.argv[1], encoding="utf-8") as file:
    pairs = [tuple(pair) for pair in json.load(file)]
iterations, output = int(sys.argv[2]), sys.argv[3]
def cpu():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
def report(start, links):
    print(json.dumps([time.perf_counter() - start[0], cpu() - start[1]]))
    with open(output, "w") as file:
        file.writelines(" ".join(f"{i}-{j}" for i, j in line) + "\\n" for line in links)
"""
OURS = """
from hf_attn_dynamics import IbmModel1
start = time.perf_counter(), cpu()
report(start, IbmModel1().fit(pairs, iterations, count_repeats={count_repeats}).align(pairs))
"""
SYSTEMS = {
    "package": OURS.format(count_repeats=True),
    "once": OURS.format(count_repeats=False),
    "nltk": """
from nltk.translate import AlignedSent, IBMModel1
corpus = [AlignedSent(target, source) for source, target in pairs]
start = time.perf_counter(), cpu()
IBMModel1(corpus, iterations)
report(start, [[(i, j) for j, i in pair.alignment if i is not None] for pair in corpus])
""",
    "eflomal": """
import eflomal, tempfile
sides = [[" ".join(side) + "\\n" for side in column] for column in zip(*pairs)]
forward, reverse = output + ".forward", output + ".reverse"
start = time.perf_counter(), cpu()
eflomal.Aligner(model=1).align(
    sides[0], sides[1], links_filename_fwd=forward, links_filename_rev=reverse, quiet=True
)
with open(forward) as file:
    links = [[tuple(map(int, link.split("-"))) for link in line.split()] for line in file]
report(start, links)
""",
}
PEERS = ("nltk", "eflomal")


@dataclass
class BenchmarkArguments:
    """What is aligned, and how often."""

    source_file: str | None = field(default=None, metadata={"help": "Sentences, a line each; also gzip."})
    target_file: str | None = field(default=None, metadata={"help": "Their translations, line by line."})
    max_pairs: int = field(default=29000, metadata={"help": "Sentence pairs at most, the first of the files."})
    iterations: int = field(default=5, metadata={"help": "Iterations of expectation maximisation."})
    rounds: int = field(default=3, metadata={"help": "Turns of each system."})
    peer_python: str = field(default=sys.executable, metadata={"help": "Interpreter that has NLTK and eflomal."})
    output_dir: str | None = field(default=None, metadata={"help": "Where to write summary.json, if anywhere."})


def read_pairs(args: BenchmarkArguments) -> list[tuple[list[str], list[str]]]:
    """Words of sentences and their translations."""
    if (args.source_file is None) != (args.target_file is None):
        raise ValueError("give source_file and target_file, or neither.")
    if args.source_file is None:
        return invented_pairs(args.max_pairs)
    rows = load_parallel(args.source_file, args.target_file).select_columns(["source", "target"])
    rows = rows.select(range(min(args.max_pairs, len(rows))))
    return [(row["source"].lower().split(), row["target"].lower().split()) for row in rows]


def invented_pairs(count: int) -> list[tuple[list[str], list[str]]]:
    """Sentences of 6 to 18 of 10,000 words; translations leave a tenth out and are in another order."""
    draw = random.Random(0)
    words = range(10_000)
    weights = [1 / (rank + 1) for rank in words]
    pairs = []
    for _ in range(count):
        sentence = draw.choices(words, weights, k=draw.randint(6, 18))
        translation = [word for word in sentence if draw.random() < 0.9] or sentence
        draw.shuffle(translation)
        pairs.append(([f"s{word}" for word in sentence], [f"t{word}" for word in translation]))
    return pairs


def run_system(name: str, args: BenchmarkArguments, folder: Path) -> tuple[float, float]:
    """Wall and CPU seconds of one system; its links lie in the folder, in the Pharaoh format."""
    command = [
        args.peer_python if name in PEERS else sys.executable,
        "-c",
        PREAMBLE + SYSTEMS[name],
        str(folder / "pairs.json"),
        str(args.iterations),
        str(folder / name),
    ]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=one_thread)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
    wall, cpu = json.loads(done.stdout.splitlines()[-1])
    return wall, cpu


def same_links(one: Path, other: Path) -> float:
    """F1 of two files of links."""
    first, second = (list(map(set, read_pharaoh(path))) for path in (one, other))
    shared = sum(len(a & b) for a, b in zip(first, second))
    return 2 * shared / sum(len(links) for links in first + second)


def main(args: BenchmarkArguments) -> dict:
    """Run the benchmark; returns the summary."""
    with refuse_bad_input():
        if args.output_dir:
            check_output_dir(args.output_dir, {}, resume=False)
        pairs = read_pairs(args)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in SYSTEMS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "pairs.json").write_text(json.dumps(pairs), encoding="utf-8")
        for _ in range(args.rounds):
            for name in list(seconds):
                try:
                    seconds[name].append(run_system(name, args, folder))
                except RuntimeError as error:
                    if name not in PEERS:
                        raise
                    print(f"{name} is left out: {error}")
                    del seconds[name]
        reference = {name: "once" if name == "nltk" else "package" for name in seconds}
        links = {name: same_links(folder / name, folder / reference[name]) for name in seconds}
    summary: dict = {}
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
        }
        summary |= figures
        rows.append([name, *figures.values()])
    header = ["system", "wall (s)", "CPU (s)", "pairs / CPU s", "CPU time / package", "same links"]
    print(format_table(header, rows))
    summary |= {key: value for key, value in asdict(args).items() if key != "output_dir"}
    summary |= {"pairs": len(pairs), **provenance(0, "cpu")}
    if args.output_dir:
        write_json(Path(args.output_dir) / SUMMARY, summary)
    return summary


if __name__ == "__main__":
    run_recipe(main, BenchmarkArguments)
