"""`make gpu-check`: the tests that need a GPU, once more under compute-sanitizer, then the rates.

Without a GPU it says so and passes: nothing was checked, and the last line counts the tests as skipped.
"""

import re
import shutil
import subprocess
import sys

from grpo_lab.packing import cuda

TESTS = [sys.executable, "-m", "pytest", "tests/gpu", "-rs", "--timeout", "600"]


def run(command):
    """Prints what the command prints and returns (exit code, output)."""
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    sys.stdout.write(done.stdout)
    return done.returncode, done.stdout


def total(output, word):
    return sum(int(count) for count in re.findall(rf"(\d+) {word}", output))


def main():
    reason = cuda.unavailable()
    if reason is not None:
        sys.stdout.write(f"gpu-check: nothing that needs a GPU was run: {reason}\n")
    code, output = run(TESTS)
    passed, skipped, failed = (total(output, word) for word in ("passed", "skipped", "failed"))
    if reason is None:
        if shutil.which("compute-sanitizer"):
            code = (
                run(["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", *TESTS])[0] or code
            )
        else:
            sys.stdout.write(
                "gpu-check: compute-sanitizer is not on PATH; memory errors were not looked for\n"
            )
        code = run([sys.executable, "tests/gpu/bench_packing_cuda.py"])[0] or code
    sys.stdout.write(f"{passed} passed, {failed} failed, {skipped} skipped\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
