"""What can be imported where only the required libraries are installed."""

from fresh_processes import python


# Those of the extras, and what only they require. PyYAML is required by Transformers and the Hub's client.
HIDDEN = "matplotlib accelerate datasets evaluate sklearn sacrebleu seqeval pyarrow pandas sentencepiece captum peft"
# Modules whose functions return datasets of the library datasets, or turn these into others.
OF_DATASETS = {
    "class_files",
    "classification",
    "demo.images",
    "demo.numerals",
    "demo.topics",
    "documents",
    "glue",
    "parallel",
    "text",
    "token_classification",
}
CODE = f"""
import sys
from importlib.machinery import PathFinder

hidden = "{HIDDEN}".split()
for name in [*sys.modules]:
    if name.partition(".")[0] in hidden:
        del sys.modules[name]
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.partition(".")[0] in hidden else find(name, *rest)
)

import hf_attn_dynamics
from hf_attn_dynamics import analysis, data, hub, models, training
from hf_attn_dynamics._stub import public_names

def failing(package):
    names = public_names(package.__name__)
    for name in [*names.module_of, *names.subpackages]:
        try:
            getattr(package, name)
        except ImportError as error:
            yield f"{{name}}|{{error}}"

for package in (hf_attn_dynamics, analysis, models, training, hub):
    print(*failing(package), sep="\\n")
print("data")
print(*failing(data), sep="\\n")
"""


def test_every_public_name_imports_without_the_extras_but_readers_that_return_data_sets():
    from hf_attn_dynamics import data
    from hf_attn_dynamics._stub import public_names

    (result,) = python(["-c", CODE], bare=True)
    assert not result.returncode, result.stderr
    of_package, _, of_data = result.stdout.partition("data\n")
    assert not of_package.strip()
    module_of = public_names(data.__name__).module_of
    failing = dict(line.split("|") for line in of_data.split("\n") if line)
    assert {*failing} == {
        name for name, module in module_of.items() if module.removeprefix(f"{data.__name__}.") in OF_DATASETS
    }
    assert failing["load_texts"] == 'load_texts needs the library datasets: pip install "hf_attn_dynamics[recipes]".'
