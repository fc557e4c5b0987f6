import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    # Triton looks when a kernel is defined; the modules that define them are imported when they are used.
    os.environ["TRITON_INTERPRET"] = "1"

# Helper modules beside the tests; pytest's importlib mode does not put this folder on the path.
sys.path.insert(0, str(Path(__file__).parent))
