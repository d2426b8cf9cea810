"""Processes that nothing of the package was imported in, without the seconds that their libraries take to import.

A nursery imports PyTorch, Transformers and what they need once; each process is a fork of it, with arguments,
environment and folder of its own, and ends as `python` does. What a library reads from the environment when it is
imported (also for PyTorch: one thread) cannot be told such a process. With `bare=True` Transformers, the Hub's client
and other kin of theirs are not imported yet, and can be told.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path


LIBRARIES = (
    "torch._dynamo torch._meta_registrations torch.distributed.tensor torch.distributed.fsdp torch.utils.data numpy"
    " pandas pyarrow.dataset pyarrow.parquet scipy.optimize scipy.stats sklearn.metrics matplotlib.pyplot yaml"
    " tokenizers safetensors.torch"
)
KIN = (
    "accelerate.utils datasets evaluate huggingface_hub transformers.trainer transformers.pipelines"
    " transformers.models.auto.modeling_auto transformers.models.auto.tokenization_auto"
)
_nursery, _streams = [], {}


def python(*commands, env=None, cwd=None, bare=False, timeout=500):
    """Runs Python side by side with these arguments, as `python -c CODE WORD…`, `python -m NAME WORD…` or a script.

    Args:
        commands (lists of `str`): Arguments of each.
        env (`dict` or `list[dict]`, *optional*): All of the environment, or of each; by default that of this process.
        cwd (`str` or `Path`, *optional*): Folder to run in; by default that of this process.
        bare (`bool`): Whether Transformers and its kin are yet to be imported, too.
        timeout (`int`): Seconds after which they are stopped.

    Returns:
        list of `subprocess.CompletedProcess`: With output and errors as text.
    """
    envs = env if isinstance(env, list) else [os.environ if env is None else env] * len(commands)
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            {
                "argv": [str(word) for word in command],
                "env": dict(its_env),
                "cwd": str(cwd or os.getcwd()),
                "timeout": timeout,
                "output": f"{folder}/{index}.out",
                "errors": f"{folder}/{index}.err",
            }
            for index, (command, its_env) in enumerate(zip(commands, envs, strict=True))
        ]
        codes = _ask(bare, jobs)
        texts = [[Path(job[name]).read_text() for name in ("output", "errors")] for job in jobs]
    return [subprocess.CompletedProcess(*three) for three in zip(commands, codes, *zip(*texts))]


def _ask(bare, jobs):
    if not _streams:
        ends = {True: socket.socketpair(), False: socket.socketpair()}
        theirs = [pair[1].fileno() for pair in ends.values()]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        _nursery.append(subprocess.Popen([sys.executable, __file__, *map(str, theirs)], env=env, pass_fds=theirs))
        for kind, (mine, other) in ends.items():
            other.close()
            # Nurseries end when this process does, and closes it.
            _streams[kind] = mine.makefile("rw")
    print(json.dumps(jobs), file=_streams[bare], flush=True)
    answer = _streams[bare].readline()
    assert answer, "the process that others are forks of has died"
    return json.loads(answer)


def _serve(descriptor):
    """Answers requests; returns in each process that is started, with what it is to do."""
    stream = socket.socket(fileno=descriptor).makefile("rw")
    while line := stream.readline():
        processes = []
        for job in json.loads(line):
            processes.append(os.fork())
            if not processes[-1]:
                return job
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
        print(json.dumps(codes), file=stream, flush=True)
    sys.exit()


def _load(names):
    for name in names.split():
        with contextlib.suppress(ModuleNotFoundError):  # of an optional library
            importlib.import_module(name)
    # Collecting garbage would look at all of this, and copy it.
    gc.freeze()


def _become(job):
    """Makes this process what `python` with these arguments is, and runs what they name."""
    signal.alarm(job["timeout"])
    for target, name, mode in ((0, os.devnull, os.O_RDONLY), (1, job["output"], None), (2, job["errors"], None)):
        source = os.open(name, os.O_WRONLY | os.O_CREAT if mode is None else mode)
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    first, *words = job["argv"]
    has_option = first in ("-c", "-m")
    sys.argv = [first, *words[has_option:]]
    added = [path for path in job["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = ["" if has_option else str(Path(first).resolve().parent), *added]
    if first == "-c":
        exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    # The folder of this file is not on the path of what is started here.
    sys.path.pop(0)
    _load(LIBRARIES)
    bare, other = map(int, sys.argv[1:])
    if not os.fork():
        _load(KIN)
        bare = other
    _become(_serve(bare))
