"""Makes the modules beside the tests importable in every pytest import mode."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
