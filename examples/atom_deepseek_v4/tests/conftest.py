import sys
from pathlib import Path

# Helper modules beside the tests; pytest's importlib mode does not put this folder on the path.
sys.path.insert(0, str(Path(__file__).parent))
