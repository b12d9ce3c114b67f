"""A checkpoint folder with `trust_remote_code=True`: in a process that never imported lol, that cannot, that has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

from ecosystem_cases import source_folder
from lol import LoLConfig, LoLForCausalLM
from lol.train.loading import find_checkpoint

PROMPT = "library of"


def run(program: str, folder: Path, *arguments: object) -> str:
    """What a fresh process prints, with nobody at the keyboard."""
    environment = os.environ | {
        "PYTHONPATH": str(source_folder()),
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(folder / "modules"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


NEVER_IMPORTED = """
import json, sys, torch
torch.set_num_threads(1)
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

folder, expected, found = sys.argv[1], load_file(sys.argv[2]), {}
for auto in (AutoConfig, AutoModel, AutoModelForCausalLM):
    try:
        auto.from_pretrained(folder)
    except ValueError as error:
        found[auto.__name__] = "trust_remote_code=True" in str(error)
found["lol before"] = "lol" in sys.modules
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
found["config"] = type(config).__module__
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
base = AutoModel.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
batch = tokenizer("library of", return_tensors="pt")
with torch.no_grad():
    found["logits"] = torch.equal(model(**batch).logits, expected["logits"])
    found["base"] = torch.equal(base(**batch).last_hidden_state, model.model(**batch).last_hidden_state)
found["text"] = torch.equal(model.generate(**batch, max_new_tokens=12, do_sample=False), expected["text"])
model.save_pretrained(sys.argv[3])
print()  # transformers leaves the line with its question open
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_process_that_never_imported_lol(trained: Path, tmp_path: Path):
    folder = find_checkpoint(trained)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        logits = model(**batch).logits
    text = model.generate(**batch, max_new_tokens=12, do_sample=False)
    save_file({"logits": logits, "text": text}, tmp_path / "expected.safetensors")
    printed = run(NEVER_IMPORTED, tmp_path, folder, tmp_path / "expected.safetensors", tmp_path / "again")
    assert json.loads(printed.splitlines()[-1]) == {
        "AutoConfig": True,
        "AutoModel": True,
        "AutoModelForCausalLM": True,
        "lol before": False,
        "config": "lol.model.config",
        "logits": True,
        "base": True,
        "text": True,
    }
    # transformers copies the source of what it loaded by remote code into whatever is saved next; ours is left out.
    assert sorted(path.name for path in (tmp_path / "again").glob("*.py")) == ["modeling_lol.py"]


PIPELINE_FIRST = """
import sys
from transformers import pipeline
print("before", "lol" in sys.modules)
generate = pipeline("text-generation", model=sys.argv[1], trust_remote_code=True)
print("text:" + generate("library of", max_new_tokens=12, do_sample=False)[0]["generated_text"])
"""


@pytest.mark.slow
def test_a_pipeline_in_a_process_that_never_imported_lol(trained: Path, tmp_path: Path):
    folder = find_checkpoint(trained)
    generate = pipeline("text-generation", model=str(folder))
    expected = generate(PROMPT, max_new_tokens=12, do_sample=False)[0]["generated_text"]
    before, _, text = run(PIPELINE_FIRST, tmp_path, folder).partition("text:")
    assert before == "before False\n"
    assert text.removesuffix("\n") == expected


MISSING = """
import sys, types
from transformers import AutoConfig, AutoModelForCausalLM

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "lol":
            raise ModuleNotFoundError("No module named 'lol'", name="lol")

sys.meta_path.insert(0, Missing())
for load in (AutoConfig, AutoModelForCausalLM):
    try:
        load.from_pretrained(sys.argv[1], trust_remote_code=True)
    except ImportError as error:
        print(error)
sys.modules["lol"] = types.ModuleType("lol")  # another package of that name
try:
    AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
except ImportError as error:
    print(error)
"""


@pytest.mark.slow
def test_without_lol_the_message_says_what_to_install(trained: Path, tmp_path: Path):
    lines = run(MISSING, tmp_path, find_checkpoint(trained)).splitlines()
    assert len(lines) == 3
    assert lines[0] == lines[1]
    assert "needs the Python package library-of-layers (No module named 'lol')" in lines[0]
    assert "needs the Python package library-of-layers (cannot import name" in lines[2]
    assert all("install that package" in line for line in lines)


def test_a_process_that_has_imported_lol_runs_no_code_of_the_folder(trained: Path, tmp_path: Path):
    folder = find_checkpoint(trained)
    copy = tmp_path / "copy"
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model.save_pretrained(copy)
    AutoTokenizer.from_pretrained(folder).save_pretrained(copy)
    (copy / "modeling_lol.py").write_text("raise SystemExit('code of the folder was run')\n")
    assert type(AutoConfig.from_pretrained(copy, trust_remote_code=True)) is LoLConfig
    assert type(AutoModelForCausalLM.from_pretrained(copy, trust_remote_code=True)) is LoLForCausalLM
    texts = [
        pipeline("text-generation", model=str(copy), trust_remote_code=trust)(PROMPT, max_new_tokens=8, do_sample=False)
        for trust in (True, None)
    ]
    assert texts[0] == texts[1]
    assert texts[0][0]["generated_text"].startswith(PROMPT)
