"""`make sanitize`: builds the packer with sanitizers and runs its tests with that build in place of the
installed one.

First a planted overflow must be reported, so that a silent sanitizer cannot pass for a clean one.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "sanitize"
SITE = BUILD / "site"
OVERFLOW = """
import numpy as np
from grpo_lab.packing import _packing as extension, device
import sys
assert "sanitize" in extension.__file__, extension.__file__
piece = np.zeros(1, dtype=device.PIECE)
source = np.ones(100, dtype=np.uint8)
piece[0]["end"], piece[0]["data"] = 100_000, source.ctypes.data
piece[0]["dtype"] = piece[0]["wire_dtype"] = 5
extension.emulate_device_pack(piece.view("u1"), np.zeros(100_000, dtype=np.uint8))
"""


def build(name, sanitizers, target):
    """Configures and builds one target with the given sanitizers; returns its folder."""
    folder = BUILD / name
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja",
    f"-DGRPO_LAB_SANITIZE={sanitizers}",
                 f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
                 f"-DGRPO_LAB_OUTPUT={SITE / 'grpo_lab' / 'packing'}"]  # fmt: skip
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(folder), "-j", "2", "--target", target], check=True)
    return folder


def runtime(name):
    """The sanitizer's shared library, which must be loaded before Python is."""
    compiler = os.environ.get("CXX", "c++")
    path = subprocess.run([compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    return path.stdout.strip()


def main(tests):
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.copytree(
        ROOT / "grpo_lab", SITE / "grpo_lab", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    threads = build("thread", "thread", "packing_stress") / "packing_stress"
    if subprocess.run([str(threads)], check=False).returncode:
        sys.exit("ThreadSanitizer found a race in the packer's threads")
    build("address", "address,undefined", "_packing")
    environment = os.environ | {
        "LD_PRELOAD": f"{runtime('libasan.so')}:{runtime('libubsan.so')}",
        "PYTHONPATH": str(SITE),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",  # the interpreter itself never frees everything
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
    }
    planted = subprocess.run(
        [sys.executable, "-c", OVERFLOW],
        env=environment,
        cwd=BUILD,
        text=True,
        capture_output=True,
        check=False,
    )
    if "heap-buffer-overflow" not in planted.stderr:
        sys.exit(f"the planted overflow was not reported:\n{planted.stdout}{planted.stderr}")
    pytest = [
        str(Path(sys.executable).with_name("pytest")),
        "-m",
        "not nightly",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    return subprocess.run(pytest, env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
