"""Nothing is pickled: no code of the package does it, and no file of a run needs it."""

import ast
import zipfile
from pathlib import Path

import pytest
from safetensors.torch import load_file

import lol
from lol.train.trainer import train
from small_run import small_config, write_corpus

SOURCES = sorted(Path(lol.__file__).parent.rglob("*.py"))
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FORBIDDEN_CALLS = {"torch.save", "torch.load", "pandas.read_pickle", "pd.read_pickle", "np.load", "numpy.load"}


def offences(source: str) -> list[str]:
    """Imports and calls that pickle or unpickle."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in names if name.split(".")[0] in FORBIDDEN_MODULES or name in FORBIDDEN_CALLS]
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            found += [name] if name in FORBIDDEN_CALLS or node.attr in ("to_pickle", "read_pickle") else []
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
            found.append(node.arg)
        elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            found += [] if isinstance(node.value, ast.Constant) and node.value.value is False else [node.arg]
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "from torch import load",
        "torch.load(file)",
        "torch.save(x, file)",
        "frame.to_pickle(file)",
        "np.load(file)",
        "read(file, allow_pickle=True)",
        "load(path, trust_remote_code=True)",
    ],
)
def test_an_offence_is_found(source: str) -> None:
    assert len(offences(source)) == 1


def test_the_package_does_not_pickle() -> None:
    assert len(SOURCES) > 30
    assert {str(path): found for path in SOURCES if (found := offences(path.read_text()))} == {}


def test_the_files_of_a_run_are_text_or_safetensors(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(small_config(write_corpus(tmp_path / "corpus.txt"), steps=1), run)
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {"model.safetensors", "optimizer.safetensors", "training.safetensors"} <= {path.name for path in files}
    for path in files:
        assert not zipfile.is_zipfile(path), path
        if path.suffix == ".safetensors":
            load_file(path)
        else:
            # Text; a pickle begins with byte 0x80, which UTF-8 does not.
            path.read_text(encoding="utf-8")
