"""Private names of other libraries: all in one file, each of them there, and none anywhere else."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import (
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

import hf_attn_dynamics
from hf_attn_dynamics.models import compat
from hf_attn_dynamics.models.compat import PrivateName, check_private_names


PACKAGE = Path(hf_attn_dynamics.__file__).parent
ROOT = PACKAGE.parent
TREES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for folder in (PACKAGE, ROOT / "recipes")
    for path in sorted(folder.rglob("*.py"))
}
CLASSES = {node.name: node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
COMPAT = "hf_attn_dynamics/models/compat.py"

# Methods and attributes of named tuples that the documentation of Python names: these have no public ones.
NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}

# Classes of other libraries that classes of this package extend.
EXTENDED = (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    PreTrainedModel,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.autograd.Function,
    torch.utils.data.Dataset,
    torch.utils.data.Sampler,
)
# Modules of Transformers that its documentation names, or imports from.
DOCUMENTED = {
    "transformers",
    "transformers.masking_utils",
    "transformers.modeling_outputs",
    "transformers.modeling_utils",
    "transformers.pytorch_utils",
    "transformers.trainer_callback",
    "transformers.trainer_utils",
    "transformers.training_args",
    "transformers.utils",
    "transformers.utils.logging",
}
DOCUMENTED_OUTPUTS = {"BertForPreTrainingOutput", "ElectraForPreTrainingOutput"}


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not (name.startswith("__") and name.endswith("__"))


LISTED = {entry.name for entry in compat.PRIVATE_NAMES if is_private(entry.name)}
OF_LIBRARIES = LISTED | {name for cls in EXTENDED for name in dir(cls) if is_private(name)}


def own_names(trees: dict[str, ast.AST]) -> set[str]:
    """Private names that code defines itself: functions, classes, variables, and attributes of its `self`."""
    found = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
    return {name for name in found if is_private(name)} - OF_LIBRARIES


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def defined_in(body: list[ast.stmt]) -> Iterator[str]:
    """Names that the body of a class defines."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield statement.name
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def private_uses(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Private names of other libraries in a file: attributes, imports, strings, and what its classes override.

    An override that `OVERRIDDEN_NAMES` has, and its calls of the method that it overrides, are left out.
    """
    overrides = set()
    pieces = {id(piece) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for piece in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for name in OF_LIBRARIES & set(defined_in(node.body)):
                if node.name not in overridden(name):
                    yield name
                overrides |= {
                    id(inner)
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Attribute) and inner.attr == name and is_super(inner.value)
                }
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and id(node) not in overrides:
            if node.attr not in own | NAMED_TUPLE:
                yield node.attr
        elif isinstance(node, ast.Attribute) and node.attr == "ops" and getattr(node.value, "id", "") == "torch":
            yield "torch.ops"  # operators that functions of PyTorch call, few of them documented
        elif isinstance(node, ast.Constant) and id(node) not in pieces:
            # Others may be any text; those that are listed are names of attributes.
            if isinstance(node.value, str) and node.value in LISTED:
                yield node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "getattr",
            "setattr",
            "hasattr",
            "delattr",
        ):
            name = getattr(node.args[1], "value", None) if len(node.args) > 1 else None
            if isinstance(name, str) and is_private(name) and name not in own:
                yield name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from private_imports(alias.name, [])
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from private_imports(node.module, [alias.name for alias in node.names])


def private_imports(module: str, names: list[str]) -> Iterator[str]:
    library = module.split(".")[0]
    if library in ("hf_attn_dynamics", "recipes", "__future__"):
        return
    yield from filter(is_private, [*module.split("."), *names])
    if library == "transformers" and module not in DOCUMENTED:
        yield from (name for name in names or [module] if name not in DOCUMENTED_OUTPUTS)


def overridden(name: str) -> set[str]:
    """Classes of this package that may override a private name."""
    entries = [entry for entry in compat.OVERRIDDEN_NAMES if entry.name == name]
    return {cls for entry in entries for cls in entry.overridden_by.split(", ")}


OWN = own_names(TREES)


@pytest.mark.parametrize("entry", compat.PRIVATE_NAMES, ids=lambda entry: f"{entry.owner}.{entry.name}")
def test_the_installed_version_has_every_private_name(entry, monkeypatch):
    monkeypatch.setattr(compat, "PRIVATE_NAMES", (entry,))
    assert check_private_names() == []


def test_a_name_that_is_gone_is_told_with_its_purpose(monkeypatch):
    gone = (
        PrivateName("transformers:Trainer", "_no_such_name", "train", "it trains", "never trains"),
        PrivateName("transformers:NoSuchClass", "_name", "learn", "it learns"),
        PrivateName("transformers.no_such_module", "_name", "read", "it reads"),
    )
    monkeypatch.setattr(compat, "PRIVATE_NAMES", (*compat.PRIVATE_NAMES, *gone))
    first, *others = check_private_names()
    assert first == (
        "transformers:Trainer has no _no_such_name, which is needed to train; without it, this package never trains."
    )
    assert [re.search("needed to (.*?);", told)[1] for told in others] == ["learn", "read"]


def test_every_private_name_has_its_purpose_and_the_condition_under_which_it_can_go():
    for entry in compat.PRIVATE_NAMES:
        assert all((entry.purpose, entry.until, entry.otherwise)), entry
    pairs = [(entry.owner, entry.name) for entry in compat.USED_NAMES]
    assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize("path", [path for path in TREES if path != COMPAT])
def test_private_names_of_other_libraries_are_in_one_file(path):
    assert not set(private_uses(TREES[path], OWN))


def test_the_functions_of_that_file_use_no_private_name_that_it_does_not_list():
    own = own_names({COMPAT: TREES[COMPAT]})
    assert set(private_uses(TREES[COMPAT], own)) <= LISTED


def test_every_name_that_is_listed_is_used():
    tables = {"USED_NAMES", "UNDOCUMENTED_NAMES", "OVERRIDDEN_NAMES"}
    code = [
        statement
        for statement in TREES[COMPAT].body
        if not (isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") in tables)
    ]
    used = set(private_uses(ast.Module(code, []), own_names({COMPAT: TREES[COMPAT]})))
    assert {entry.name for entry in compat.USED_NAMES} <= used
    imported = {
        alias.name
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("compat")
        for alias in node.names
    }
    assert {entry.name for entry in compat.UNDOCUMENTED_NAMES} <= imported


@pytest.mark.parametrize("entry", compat.OVERRIDDEN_NAMES, ids=lambda entry: entry.name)
def test_the_classes_that_are_said_to_override_a_name_do(entry):
    for name in entry.overridden_by.split(", "):
        arguments = {node.arg for node in ast.walk(CLASSES[name]) if isinstance(node, ast.arg)}
        assert entry.name in {*defined_in(CLASSES[name].body), *arguments}, name


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from torch import _VF", {"_VF"}),
        ("import torch._dynamo", {"_dynamo"}),
        ("torch.ops.aten.tanh_backward(o, h)", {"torch.ops"}),
        ("torch.ops.mkldnn._linear_pointwise(x)", {"torch.ops", "_linear_pointwise"}),
        ("from transformers.loss.loss_utils import fixed_cross_entropy", {"fixed_cross_entropy"}),
        ("def f(self):\n    return self._prepare_inputs({})", {"_prepare_inputs"}),
        ("def f(model):\n    model._is_hf_initialized = True", {"_is_hf_initialized"}),
        ("hasattr(model, '_orig_mod')", {"_orig_mod"}),
        ("getattr(model, '_unknown', None)", {"_unknown"}),
        ("class A:\n    def _load_best_model(self):\n        super()._load_best_model()", {"_load_best_model"}),
        ("class PrunableMixin:\n    def _load_best_model(self):\n        super()._load_best_model()", set()),
        ("class PrunableMixin:\n    def train(self):\n        self._load_best_model()", {"_load_best_model"}),
        (
            "class A:\n    def __init__(self):\n        self._own = 1\n    def f(self):\n        return self._own",
            set(),
        ),
        ("for row in rows:\n    row._asdict()", set()),
    ],
)
def test_the_search_for_private_names_finds_them(code, found):
    tree = ast.parse(code)
    assert set(private_uses(tree, own_names({"": tree}))) == found


def test_the_file_imports_no_library_before_it_needs_one():
    code = "import sys, hf_attn_dynamics.models.compat; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "accelerate"} & {*result.stdout.split()}
