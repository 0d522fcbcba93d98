"""Lets the kernel tests share kernel_problems.py and kernel_resources.py under pytest's importlib mode."""

import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)
