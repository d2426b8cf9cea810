# Licensed under the Apache License, Version 2.0.
"""Fetches the test-suite of the installed Transformers and imports it under a name of its own.

The suite is part of Transformers' source distribution, not of its wheel. It is downloaded with pip once per version
into `$ATTN_DYNAMICS_PEER_CACHE` (default `~/.cache/hf_attn_dynamics/peer`).
"""

import functools
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import transformers
from filelock import FileLock


CACHE = Path(os.environ.get("ATTN_DYNAMICS_PEER_CACHE") or "~/.cache/hf_attn_dynamics/peer").expanduser()
RELEASE = f"transformers-{transformers.__version__}"
# The suite calls itself `tests`, like the folder of ours.
PACKAGE = "transformers_tests"
# How long a failed download stands, in seconds: pytest's workers take turns here, and need not all wait for a network.
RETRY_AFTER = 60

# What the suite imports and the source distribution lacks.
STUBS = {
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    # Settings that every configuration takes, each with a value that is not its default.
    "utils.test_configuration_utils": {
        "config_common_kwargs": {
            "architectures": ["AnyModel"],
            "chunk_size_feed_forward": 5,
            "dtype": "float16",
            "id2label": {0: "label"},
            "label2id": {"label": 0},
            "output_hidden_states": True,
            "problem_type": "regression",
            "return_dict": False,
        }
    },
}


class Unavailable(Exception):
    """The suite is not in the cache and could not be downloaded; the message says why."""


def _download(folder: Path):
    """Downloads the source distribution and unpacks its tests as `folder`, all or nothing."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="download-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--retries=1", "--timeout=15", "--no-deps"]
        command += ["--no-binary=:all:", f"--dest={scratch}", f"transformers=={transformers.__version__}"]
        if importlib.util.find_spec("setuptools"):
            # pip reads the metadata by running setup.py; this spares it an environment and a download for that.
            command.append("--no-build-isolation")
        pip = subprocess.run(command, capture_output=True, text=True)
        if pip.returncode:
            raise Unavailable((pip.stderr.strip().splitlines() or ["no message"])[-1])
        with tarfile.open(Path(scratch, f"{RELEASE}.tar.gz")) as archive:
            tests = [member for member in archive if member.name.startswith(f"{RELEASE}/tests/")]
            archive.extractall(scratch, members=tests, filter="data")
        unpacked = Path(scratch, RELEASE, "tests")
        # The suite reads this file, which the source distribution leaves out.
        (unpacked / "__init__.py").touch()
        unpacked.rename(folder)


def fetch() -> Path:
    """Folder with the suite of the installed version, downloaded when it is not there yet.

    Raises:
        Unavailable: if it cannot be had.
    """
    folder = CACHE / RELEASE
    failure = CACHE / f"{RELEASE}.failure"
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        with FileLock(CACHE / f"{RELEASE}.lock"):
            if folder.is_dir():
                return folder
            if failure.exists() and time.time() - failure.stat().st_mtime < RETRY_AFTER:
                raise Unavailable(failure.read_text())
            try:
                _download(folder)
            except (Unavailable, tarfile.TarError) as error:
                failure.write_text(str(error))
                raise Unavailable(str(error)) from error
            return folder
    except OSError as error:
        raise Unavailable(f"{CACHE} cannot be used: {error}") from error


@functools.cache
def import_suite() -> ModuleType:
    """Imports the suite as the package `transformers_tests`; skips the module that asks where it cannot be had."""
    try:
        folder = fetch()
    except Unavailable as error:
        pytest.skip(f"no test-suite of {RELEASE}: {error}", allow_module_level=True)
    package = ModuleType(PACKAGE)
    package.__path__ = [str(folder)]
    sys.modules[PACKAGE] = package
    for name, contents in STUBS.items():
        stub = ModuleType(f"{PACKAGE}.{name}")
        vars(stub).update(contents)
        sys.modules[stub.__name__] = stub
    with warnings.catch_warnings():
        # Its markers are registered in a conftest that is not distributed; nothing here selects by them.
        warnings.simplefilter("ignore", pytest.PytestUnknownMarkWarning)
        for name in ("test_modeling_common", "test_configuration_common"):
            setattr(package, name, importlib.import_module(f"{PACKAGE}.{name}"))
    return package
