"""Packaging of `hf_attn_dynamics`; tool settings live in `pyproject.toml`."""

import re
from pathlib import Path

from setuptools import find_packages, setup


ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "hf_attn_dynamics/__init__.py").read_text(), re.MULTILINE)[1]

RECIPES = [
    "accelerate>=1.10",
    "datasets>=4.0",
    "evaluate>=0.4.6",
    "tokenizers>=0.22",
    "sentencepiece>=0.2",
    "sacrebleu>=2.4",
    "scikit-learn",
    "seqeval>=1.2.2",
    "matplotlib>=3.9",
    "pyyaml",
]
CAPTUM = ["captum>=0.9"]
TEST = [
    *RECIPES,
    *CAPTUM,
    "pytest>=8",
    "pytest-xdist",
    "hypothesis",
    "selenium>=4.20",
    "nbclient>=0.10",
    "nbformat>=5.10",
    "ipykernel>=6.29",
    "ruff>=0.14",
    "mypy>=2.4",
    "parameterized",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "trl>=1.16; python_version >= '3.11'",
    "peft>=0.21",
    "triton; sys_platform == 'linux'",
]
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.7", "mkdocstrings[python]>=1.0", "mkdocstrings-python>=2.0"]

setup(
    name="hf_attn_dynamics",
    version=VERSION,
    description="Guide, gate, remove and read attention heads in Hugging Face Transformers 5",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["hf_attn_dynamics", "hf_attn_dynamics.*"]),
    package_data={
        "": ["*.md", "*.pyi", "py.typed"],
        "hf_attn_dynamics.analysis.pages": ["assets/*"],
        "hf_attn_dynamics.data.demo": ["*.conllu"],
    },
    entry_points={"console_scripts": ["hf-attn = hf_attn_dynamics.cli:main"]},
    python_requires=">=3.10",
    install_requires=["transformers>=5.24,<6", "torch>=2.9", "huggingface_hub", "safetensors", "numpy", "scipy"],
    extras_require={"recipes": RECIPES, "captum": CAPTUM, "test": TEST, "docs": DOCS},
    classifiers=[
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
