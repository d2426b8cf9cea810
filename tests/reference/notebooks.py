"""Executes the notebooks of the documentation; `python tests/reference/notebooks.py [NAME …]` renews their outputs.

The notebook that reads heads reads the model in the folder `NOTEBOOK_MODEL`, and trains one where there is none.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config


FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NAMES = ("read_heads", "prune_and_push", "guide_a_decoder")
SECONDS = 300  # of a cell, on a machine with other work to do


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def environment(folder: Path, model: str | None = None) -> dict[str, str]:
    """Of a kernel that has one thread and reaches no network. Progress bars warn where widgets are not installed."""
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    settings |= {"IPYTHONDIR": str(folder / "ipython"), "PYTHONWARNINGS": "ignore:IProgress not found"}
    kept = {name: value for name, value in os.environ.items() if name not in ("NOTEBOOK_MODEL", "MPLBACKEND")}
    return {**kept, **settings, **({"NOTEBOOK_MODEL": model} if model else {})}


def execute(name: str, folder: Path, model: str | None = None) -> nbformat.NotebookNode:
    """The notebook with the outputs of an execution in `folder`; errors in cells are raised."""
    notebook, work = read(name), folder / "notebooks"
    work.mkdir(exist_ok=True)
    if model:
        # Titles of pictures name the model by its path.
        (work / Path(model).name).symlink_to(Path(model).absolute())
        model = Path(model).name
    for file in FOLDER.glob("*.py"):
        shutil.copy(file, work)
    # Kernels listen on files instead of ports. Their paths must be short, which those of tests are not.
    with tempfile.TemporaryDirectory() as sockets:
        config = Config()
        config.KernelManager.transport = "ipc"
        config.KernelManager.connection_file = f"{sockets}/kernel.json"
        resources = {"metadata": {"path": str(work)}}
        client = NotebookClient(
            notebook, timeout=SECONDS, kernel_name="python3", resources=resources, record_timing=False, config=config
        )
        return client.execute(env=environment(folder, model))


def text_of(cell: nbformat.NotebookNode) -> str:
    """What a cell printed and showed, without pictures."""
    parts = []
    for output in cell.outputs:
        data = output.get("data", {})
        parts += [output.get("text", ""), *(data[kind] for kind in ("text/plain", "text/html") if kind in data)]
    return "\n".join(parts)


def clean(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """What is worth keeping: the richest form of each output, and nothing about the machine."""
    notebook.metadata = {"kernelspec": notebook.metadata.kernelspec, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if {"text/html", "image/png"} & set(output.get("data", {})):
                output.data.pop("text/plain", None)
    return notebook


def main(names: list[str]) -> None:
    for name in names or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(name, Path(folder), os.environ.get("NOTEBOOK_MODEL"))
        nbformat.write(clean(notebook), FOLDER / f"{name}.ipynb")
        print(f"{name}: {(FOLDER / f'{name}.ipynb').stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
