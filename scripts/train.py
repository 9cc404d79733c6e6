"""Train from a source checkout: ``python scripts/train.py …``, ``torchrun … scripts/train.py …``, ``srun python …``.

The same as ``megastack train``; under torchrun or srun, each process is one rank.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megastack.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
