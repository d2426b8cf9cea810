# Licensed under the Apache License, Version 2.0.
"""What `mkdocs build` does beyond its configuration: pages from outside docs/, notebooks, the API, and our docstrings.

`mkdocs.yml` names this file as a hook of MkDocs, whose functions `on_…` it calls, and as an extension of Griffe, which
reads docstrings.
"""

import base64
import json
import posixpath
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import griffe
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File


ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from hf_attn_dynamics._stub import public_names  # noqa: E402


PACKAGE = "hf_attn_dynamics"
# Files outside docs/ that are pages of the site. Other files that pages link to become a part of it under their path.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)#\s]+)")
FROM_NETWORK = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?https?:[^>]*>|<link\b[^>]*stylesheet[^>]*https?:[^>]*>"
)
# Pages of the API by module, with their titles: a module belongs to the page with the longest matching prefix.
API = {
    "analysis.reading": "Reading of heads",
    "analysis.observers": "Observers",
    "analysis.heads": "Heads and units: maps, outputs, importance, costs",
    "analysis.attribution": "Attribution",
    "analysis.relevance": "Relevance",
    "analysis.lexical": "Lexical knowledge",
    "analysis": "Results over heads and steps",
    "analysis.score_norm": "Scores and norms",
    "analysis.pages": "Views of texts",
    "analysis.plots": "Pictures",
    "catalog": "Headwise models",
    "models": "Guidance, gates, pruning and small models",
    "training": "Training",
    "data": "Data and tokenizers",
    "hub": "Model cards and the Hub",
}
# Documented for what public classes inherit from them.
BASES = {
    "analysis": ["analysis.results.Result"],
    "catalog": ["models.modeling_headwise.HeadwiseMixin", "models.configuration_headwise.HeadwiseConfigMixin"],
}

log = get_plugin_logger("hf_attn_dynamics")


def documented_names() -> dict[str, str]:
    """The public names with their modules. Each has the package that lists it: `hf_attn_dynamics.observe`."""
    top = public_names(PACKAGE)
    names = {f"{PACKAGE}.{name}": top.module_of[name] for name in top.first}
    known = {(name, top.module_of[name]) for name in top.first}
    folders = [path.parent.relative_to(ROOT) for path in (ROOT / PACKAGE).glob("*/**/__init__.pyi")]
    # The innermost package that has a name comes first.
    for folder in sorted(folders, key=lambda folder: (-len(folder.parts), folder)):
        package = ".".join(folder.parts)
        found = [item for item in public_names(package).module_of.items() if item not in known]
        names |= {f"{package}.{name}": module for name, module in found}
        known |= {*found}
    return names | {
        f"{module}.{name}": module for name, module in top.module_of.items() if (name, module) not in known
    }


def page_of(module: str) -> str:
    """The key of `API` for a module."""
    return max((page for page in API if f"{module}.".startswith(f"{PACKAGE}.{page}.")), key=len)


def api_pages() -> dict[str, str]:
    """Pages of the API reference: their paths, and their text."""
    entries = {page: [] for page in API}
    documented = documented_names()
    for name, module in documented.items():
        entries[page_of(module)].append(name)
    pages = {}
    overview = [
        "# API reference",
        "",
        "Every public name by subject. The title of an entry names the package whose `dir()` lists it: "
        "`dir(hf_attn_dynamics)` the names that you reach for first, and `dir()` of the subpackages the others. "
        "Names of `analysis`, `catalog` and `models`, and some of `training`, can also be imported from "
        "`hf_attn_dynamics`.",
        "",
        "## First names",
        "",
        link_names(name for name in documented if name.count(".") == 1),
        "",
    ]
    for page, names in entries.items():
        names += [f"{PACKAGE}.{name}" for name in BASES.get(page, [])]
        text = "\n\n".join(f"::: {name}" for name in names)
        extra = headwise_table() if page == "catalog" else ""
        pages[f"api/{page}.md"] = f"# {API[page]}\n\n{text}\n{extra}"
        overview += [f"## [{API[page]}]({page}.md)", "", link_names(names), ""]
    return {"api/index.md": "\n".join(overview), **pages}


def link_names(names: Iterable[str]) -> str:
    return ", ".join(f"[`{name.rpartition('.')[2]}`][{name}]" for name in names)


def headwise_table() -> str:
    """The classes that are created on first use, with the architectures that they are of."""
    from hf_attn_dynamics.models.headwise_classes import headwise_names

    rows = {}
    for name, row in headwise_names().items():
        rows.setdefault(row.stock_type, []).append(f"`{name}`")
    lines = [f"| `{kind}` | {', '.join(names)} |" for kind, names in rows.items()]
    head = ["", "## Headwise classes", "", "The package creates these classes at their first use:"]
    return "\n".join([*head, "", "| architecture | classes |", "|---|---|", *lines, ""])


def notebook_page(path: Path) -> dict[str, str | bytes]:
    """The page of an executed notebook, and its pictures: their paths, and their contents.

    The page is Markdown, so that its code, links and colours are those of all other pages. HTML that results show in
    notebooks stays as it is.
    """
    folder, files, parts = "notebooks", {}, []
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        # Commands to the notebook itself, such as %matplotlib, say nothing to readers.
        code = "\n".join(line for line in source.split("\n") if not line.startswith("%"))
        parts.append(f"```python\n{code}\n```")
        for index, output in enumerate(cell["outputs"]):
            data = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
            if "text/html" in data:
                parts.append(f'<div class="notebook-output">{data["text/html"]}</div>')
            elif "image/png" in data:
                picture = f"{path.stem}_files/{number}_{index}.png"
                files[f"{folder}/{picture}"] = base64.b64decode(data["image/png"])
                parts.append(f"![Output of the code above]({picture})")
            else:
                text = "".join(output.get("text", "")) or data["text/plain"]
                parts.append(f"```{{.text .notebook-output}}\n{text.rstrip()}\n```")
    parts.insert(1, f'<a href="{path.name}" download>Download this notebook</a>')
    return {f"{folder}/{path.stem}.md": "\n\n".join(parts), **files}


def on_config(config):
    pages = [{"Overview": "api/index.md"}, *({API[page]: f"api/{page}.md"} for page in API)]
    config.nav = [{"API reference": pages} if entry == {"API reference": "api"} else entry for entry in config.nav]
    return config


def on_files(files, config):
    for path, text in api_pages().items():
        files.append(File.generated(config, path, content=text))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        for path, content in notebook_page(notebook).items():
            files.append(File.generated(config, path, content=content))
    for source, path in PAGES.items():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / source)))
    pages = list(files.documentation_pages())
    for page in pages:
        for source in linked_outside(page):
            if files.get_file_from_path(source) is None:
                files.append(file := File.generated(config, source, abs_src_path=str(ROOT / source)))
                pages += [file] if file.is_documentation_page() else []
    return files


def source_of(file) -> str:
    """The path of a page in the repository."""
    if file.generated_by is None or file.src_uri.startswith("notebooks/"):
        return f"docs/{file.src_uri}"
    return next((source for source, path in PAGES.items() if path == file.src_uri), file.src_uri)


def linked_outside(file) -> Iterator[str]:
    """Files outside docs/, and no pages already, that a page links to."""
    folder = posixpath.dirname(source_of(file))
    for _, target in LINK.findall(file.content_string):
        path = posixpath.normpath(posixpath.join(folder, target))
        if not path.startswith(("docs/", "..")) and path not in PAGES and (ROOT / path).is_file():
            yield path


def on_page_markdown(markdown, page, config, files):
    """Links of the repository become those of the site."""
    if page.file.src_uri.startswith("api/"):
        return markdown
    source = source_of(page.file)

    def moved(match):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        path = re.sub(r"\.ipynb$", ".md", path)
        path = path.removeprefix("docs/") if path.startswith("docs/") else PAGES.get(path, path)
        return match[1] + posixpath.relpath(path, posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(moved, markdown)


def on_post_page(output, page, config):
    """The theme takes a script from the network for search in pages that are opened as files; ours is in the site."""
    return load_locally(output, posixpath.dirname(page.url) or ".")


def on_post_template(output_content, template_name, config):
    return load_locally(output_content, ".")


def load_locally(html: str, folder: str) -> str:
    path = posixpath.relpath("search_in_files.js", folder)
    return html.replace(FROM_NETWORK, f'<script src="{path}"></script>')


def on_post_build(config):
    """Nothing that a page loads is elsewhere."""
    for path in Path(config.site_dir).rglob("*.html"):
        for tag in LOADED.findall(path.read_text(encoding="utf-8")):
            log.warning(f"{path.relative_to(config.site_dir)} loads a file from the network: {tag}")


class TransformersDocstrings(griffe.Extension):
    """Docstrings in the style of Transformers: "name (`type`, *optional*): …", "Example:" and [`references`]."""

    def on_package(self, *, pkg, **kwargs):
        if pkg.path != PACKAGE:
            return
        bases = [f"{PACKAGE}.{name}" for names in BASES.values() for name in names]
        documented = {name: name.rpartition(".")[0] for name in bases} | documented_names()
        self.pages = {name.rpartition(".")[2]: name for name in documented}
        for name, module in documented.items():
            package, _, leaf = name.rpartition(".")
            found = pkg[f"{module}.{leaf}".removeprefix(f"{PACKAGE}.")]
            if module != package:
                # Griffe does not follow star imports of stubs.
                pkg.modules_collection[package].set_member(leaf, griffe.Alias(leaf, found))
            if not found.has_docstring:
                log.warning(f"{name} is public and has no docstring.")
            self.prepare(found.final_target if found.is_alias else found)

    def prepare(self, found):
        if found.docstring is not None and "prepared" not in found.extra.setdefault(PACKAGE, {}):
            found.extra[PACKAGE]["prepared"] = True
            text = re.sub(r"^( *)Example:$", r"\1Examples:", found.docstring.value, flags=re.MULTILINE)
            found.docstring.value = re.sub(r"\[`(\w+)`\](?![(\[])", self.reference, text)
            described = set()
            for section in found.docstring.parsed:
                if section.kind.value in ("parameters", "attributes", "returns", "yields"):
                    for entry in section.value:
                        self.set_type(entry)
                if section.kind.value == "parameters":
                    described = {name.lstrip("*") for entry in section.value for name in entry.name.split(", ")}
            taken = {parameter.name for parameter in found.parameters} if found.is_function else set()
            passed_on = {"self", "cls", "args", "kwargs"}  # need no description
            if described and taken and (wrong := described - taken | taken - described - passed_on):
                log.warning(f"The docstring of {found.path} and its signature differ: {', '.join(sorted(wrong))}.")
        if found.is_class:
            for member in found.members.values():
                if not member.is_alias and not member.name.startswith("_"):
                    self.prepare(member)

    def reference(self, match) -> str:
        name = self.pages.get(match[1])
        return f"[`{match[1]}`][{name}]" if name else f"`{match[1]}`"

    @staticmethod
    def set_type(entry):
        """Keeps types of docstrings, which have shapes, as the Markdown that they are; Griffe takes them for code."""
        if not isinstance(entry.annotation, str):
            return
        if entry.name:
            entry.description = f"{entry.annotation}: {entry.description}"
            entry.annotation = None
        else:
            entry.annotation = entry.annotation.replace("`", "")
