"""``python -m grpo_lab`` is ``grpo-lab``."""

import sys

from grpo_lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
