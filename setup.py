"""Packaging. ``scripts/setup`` installs this with the pins of ``constraints.txt``."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (ROOT / "weightsync/__init__.py").read_text(), re.MULTILINE)
assert VERSION, "weightsync/__init__.py states no __version__"

setup(
    name="weightsync",
    version=VERSION[1],
    description="Moves new weights from the processes that train a model to the engines that serve it",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    python_requires=">=3.11",
    # weightsync/actors and weightsync/recipes are links to the folders beside it.
    packages=find_packages(include=["weightsync", "weightsync.*"]),
    package_data={
        "weightsync": ["py.typed", "memory/kernels/kernels.cu"],
        "weightsync.actors": ["dashboards/*.json"],
        "weightsync.recipes": ["*.yaml", "*.json"],
        "weightsync.recipes.report": ["*.j2"],
    },
    # Their names are too common for a package: they go to share/ of the environment.
    data_files=[
        (f"share/weightsync/{folder}", [str(file) for file in Path(folder).glob("*.yaml")])
        for folder in ("configs/models", "configs/clusters", "configs/kubernetes")
    ],
    entry_points={
        "console_scripts": ["weightsync = weightsync.recipes.cli:main"],
        "sglang.srt.plugins": ["weightsync = weightsync.plugins:register_sglang"],
        "vllm.general_plugins": ["weightsync = weightsync.plugins:register_vllm"],
    },
    install_requires=[
        "torch>=2.9",
        "numpy>=2.0",
        "ray[default]>=2.50",
        "transformers>=5.5",
        "numba>=0.62",
        "msgspec>=0.19",
        "pyzmq>=26",
        "cryptography>=42",
        "psutil>=7.2",
        "pyyaml>=6.0",
        "rich>=13",
        "typer>=0.15",
        "jinja2>=3.1",
        "safetensors>=0.6",
    ],
    extras_require={
        "cuda12": ["cupy-cuda12x>=14"],
        "cuda13": ["cupy-cuda13x>=14"],
        "vllm": ["vllm>=0.24,<0.34"],
        "trl": ["trl[vllm]>=1.16,<1.17"],
        "sglang": ["sglang>=0.5.17,<0.5.24"],
        "mooncake": ["mooncake-transfer-engine>=0.3.13"],
        "deepspeed": ["deepspeed>=0.19"],
        "megatron": ["megatron-core>=0.16"],
        "peft": ["peft>=0.18"],
        "store": ["obstore>=0.12"],
        "mbridge": ["mbridge>=0.15", "megatron-core>=0.16"],
        "docs": ["mkdocs>=1.6"],
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "obstore>=0.12",
            "moto[s3]>=5.2",
            "flask-cors>=6.0",
            "jsonschema>=4.20",
            "kubernetes-validate>=1.37",
            "ruff>=0.14",
            "mypy>=1.18",
            "types-PyYAML",
        ],
    },
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Typing :: Typed",
    ],
)
