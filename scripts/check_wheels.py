"""Install wheels of the core and of the DeepSeek-V4 example into a clean environment, and see that they work there.

    python scripts/check_wheels.py              # third-party packages come from this environment; no network
    python scripts/check_wheels.py --registry   # pip installs everything, as for a user

In the clean environment, `atom check` runs on a tiny DeepSeek-V4 model and the model generates, `atom new-plugin` makes
a package, and without the example `atom check` fails and says what to install. Nothing of this repository is on the
path there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLE = REPOSITORY / "examples" / "atom_deepseek_v4"

TINY_V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 97,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "sliding_window": 9,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 3,
    "max_position_embeddings": 256,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

GENERATE = """
import sys
import atom_core, atom_deepseek_v4
from atom_core import LLM, SamplingParams
for module in (atom_core, atom_deepseek_v4):
    assert module.__file__.startswith(sys.prefix), module.__file__
llm = LLM(sys.argv[1], random_weights=0, skip_tokenizer=True, cache_memory="16MB", dtype="float32", device="cpu")
(output,) = llm.generate([[1, 2, 3] * 9], SamplingParams(max_tokens=20, temperature=0))
print(len(output.outputs[0].token_ids))
"""


def main(arguments: list[str] | None = None) -> None:
    """Build, install and check; an assertion or a failed command stops it.

    Args:
        arguments: of the command line; those of the process when `None`.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--registry", action="store_true", help="let pip fetch every dependency")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        _check(Path(folder), from_registry=options.registry)


def _check(folder: Path, *, from_registry: bool) -> None:
    core, example = (build_wheel(source, folder / "wheels") for source in (REPOSITORY, EXAMPLE))
    print(f"built {core.name} and {example.name}")
    clean = CleanEnvironment.make(folder / "environment", folder)
    clean.install([core, example], from_registry=from_registry)
    print(f"installed: {', '.join(clean.installed_plugins())}")

    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY_V4))
    check = ("check", str(model), "--random-weights", "0", "--cache-memory", "16MB", "--device", "cpu", "--json")
    found = json.loads(clean.atom(*check))
    owners = [(row["class"], row["plugin"]) for row in found["layers"]]
    _expect([("DeepseekV4Attention", "deepseek_v4")] * 3, owners, "owners of the layers")
    _expect(True, found["stateful"], "whether requests are stateful")
    _expect("20", clean.python("-c", GENERATE, str(model)).strip(), "generated tokens")
    print("atom check: every layer of a tiny DeepSeek-V4 model has its owner; 20 tokens generated")

    clean.atom("new-plugin", "trial")
    _expect(True, (folder / "atom-trial" / "src" / "atom_trial" / "py.typed").is_file(), "the generated package")
    print("atom new-plugin: the template is in the wheel")

    clean.uninstall("atom-deepseek-v4")
    message = clean.atom(*check, fails=True)
    words = (
        "atom: module 'model.layers.0.self_attn' of class DeepseekV4Attention has no owner: no plugin claims it. "
        "Plugins asked: none. atom-deepseek-v4 is known to claim this class; run `pip install atom-deepseek-v4`."
    )
    _expect(words, message.strip(), "the error without the example")
    print(f"without the example: {message.strip()}")


def build_wheel(source: Path, target: Path) -> Path:
    """Build a wheel with the build backend of this environment, from a copy, so that the tree stays as it is.

    Args:
        source: a distribution's directory.
        target: where the wheel goes.

    Returns:
        The wheel.
    """
    before = set(target.glob("*.whl")) if target.is_dir() else set()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "source"
        _copy_distribution(source, copy)
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(copy)]
        _run(command, cwd=Path(folder))
    (wheel,) = set(target.glob("*.whl")) - before
    return wheel


@dataclass(frozen=True)
class CleanEnvironment:
    """A virtual environment that knows nothing of this repository.

    Attributes:
        root: the environment's directory.
        work: where its commands run.
    """

    root: Path
    work: Path

    @classmethod
    def make(cls, root: Path, work: Path) -> CleanEnvironment:
        """Create it, empty."""
        venv.create(root, with_pip=False)
        return cls(root, work)

    def install(self, wheels: list[Path], *, from_registry: bool) -> None:
        """Install wheels, and their dependencies from the registry or by showing it those of this environment.

        Args:
            wheels: what to install.
            from_registry: whether pip may fetch dependencies.
        """
        if not from_registry:
            third_party = self.root / "third_party"
            link_third_party(third_party)
            (self._site_packages() / "third_party.pth").write_text(f"{third_party}\n")
        options = [] if from_registry else ["--no-deps", "--no-index"]
        self._pip("install", "--quiet", *options, *map(str, wheels))

    def uninstall(self, distribution: str) -> None:
        """Remove a distribution."""
        self._pip("uninstall", "--quiet", "--yes", distribution)

    def installed_plugins(self) -> list[str]:
        """Plugins as `atom plugins` shows them."""
        return [f"{row['name']} ({row['status']})" for row in json.loads(self.atom("plugins", "--json"))]

    def atom(self, *arguments: str, fails: bool = False) -> str:
        """Run `atom`; return what it printed, or its error where it must fail with exit code 2."""
        return _run([str(self.root / "bin" / "atom"), *arguments], cwd=self.work, code=2 if fails else 0)

    def python(self, *arguments: str) -> str:
        """Run the environment's interpreter and return what it printed."""
        return _run([str(self.root / "bin" / "python"), *arguments], cwd=self.work)

    def _pip(self, *arguments: str) -> None:
        _run([sys.executable, "-m", "pip", "--python", str(self.root / "bin" / "python"), *arguments], cwd=self.work)

    def _site_packages(self) -> Path:
        return Path(self.python("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


def link_third_party(target: Path) -> None:
    """Link everything in this environment's site-packages but the distributions of this repository.

    Those are editable here; their metadata would be found twice. A linked directory is put on the path of the clean
    environment; `.pth` files in it have no effect.

    Args:
        target: a directory to make.
    """
    target.mkdir()
    own = set()
    for project in (REPOSITORY / "pyproject.toml", *REPOSITORY.glob("*/*/pyproject.toml")):
        name = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["name"]
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        own |= {file.parts[0] for file in files}
    for folder in dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib")):
        for entry in Path(folder).iterdir():
            if entry.name not in own and entry.suffix != ".pth":
                (target / entry.name).symlink_to(entry)


def _copy_distribution(source: Path, target: Path) -> None:
    """Copy the files that git knows or would know: what a checkout has, and nothing that was built."""
    listed = _run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "."], cwd=source)
    for name in filter(None, listed.split("\0")):
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((source / name).read_bytes())


def _run(command: list[str], *, cwd: Path, code: int = 0) -> str:
    """Run a command away from this repository's settings.

    Args:
        command: what to run.
        cwd: where.
        code: the exit code that it must have.

    Returns:
        stdout, or stderr where the code is not 0.
    """
    dropped = re.compile(r"PYTHONPATH|PYTHONHOME|VIRTUAL_ENV|ATOM_\w+|GIT_\w+")
    environment = {name: value for name, value in os.environ.items() if not dropped.fullmatch(name)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != code:
        raise SystemExit(
            f"{' '.join(command)}: exit code {done.returncode}, expected {code}\n{done.stdout}{done.stderr}"
        )
    return done.stderr if code else done.stdout


def _expect(expected: object, found: object, what: str) -> None:
    if found != expected:
        raise SystemExit(f"{what}: found {found!r}, expected {expected!r}")


if __name__ == "__main__":
    main()
