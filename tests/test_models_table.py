"""No model type of transformers gives a wrong token or fails: what docs/models.md says stays true."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "models_table.py"


def test_no_type_is_wrong_or_fails(tmp_path):
    command = [sys.executable, str(SCRIPT), "--workers", "1", "--output", str(tmp_path / "models.md")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert not [line for line in lines if line.startswith(("wrong", "failed"))]
    assert done.returncode == 0, done.stderr
    assert sum(line.startswith("works") for line in lines) > 100
