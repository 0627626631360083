"""The studies are no part of the package: tests find them beside it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
