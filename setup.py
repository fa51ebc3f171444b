"""Builds the C++ packer with CMake. All metadata is in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Runs CMake for the one extension of this package; the optional CUDA part never fails the build."""

    def build_extension(self, ext: Extension) -> None:
        out = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        work = Path(self.build_temp).resolve() / "cmake"
        work.mkdir(parents=True, exist_ok=True)
        configure = [
            # --fresh: an isolated build has its own cmake, ninja and pybind11, gone by the next build
            "cmake", "--fresh", "-S", str(ROOT), "-B", str(work), "-G", "Ninja",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DGRPO_LAB_OUTPUT={out}",
        ]  # fmt: skip
        subprocess.run(configure, check=True)  # noqa: S603
        jobs = str(min(4, os.cpu_count() or 1))
        build = ["cmake", "--build", str(work), "-j", jobs, "--target", "_packing"]
        subprocess.run(build, check=True)  # noqa: S603
        self.build_cuda(work, jobs)

    def build_cuda(self, work: Path, jobs: str) -> None:
        if not shutil.which("nvcc"):
            return
        build = ["cmake", "--build", str(work), "-j", jobs, "--target", "packing_cuda"]
        if subprocess.run(build, check=False).returncode != 0:  # noqa: S603
            self.warn(
                "nvcc was found, but the CUDA packer did not build; the CPU packer is complete without it"
            )

    def copy_extensions_to_source(self) -> None:
        """Editable installs copy declared extensions only; the CUDA object lies beside ours."""
        super().copy_extensions_to_source()
        cuda_object = Path("grpo_lab", "packing", "_packing_cuda.so")
        if (built := Path(self.build_lib).resolve() / cuda_object).exists():
            shutil.copy2(built, ROOT / cuda_object)


setup(ext_modules=[Extension("grpo_lab.packing._packing", sources=[])], cmdclass={"build_ext": CMakeBuild})
