"""transformers' own test classes for models, loaded from its source distribution.

`fetch_transformers_tests.py` puts them below `sys.prefix`; nothing of them is part of this repository. The source
distribution leaves folders of transformers' tests out. What the rest imports from those is stood in for here: test
classes by empty ones, numbers by our own.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import transformers

PACKAGE = "transformers_own_tests"

STAND_INS: dict[str, dict[str, Any]] = {
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    # Values of transformers' own configuration fields, all different from their defaults.
    "utils.test_configuration_utils": {
        "config_common_kwargs": {
            "architectures": ["LoLForCausalLM"],
            "chunk_size_feed_forward": 3,
            "dtype": "float16",
            "id2label": {0: "shelf", 1: "book"},
            "label2id": {"shelf": 0, "book": 1},
            "output_hidden_states": True,
            "problem_type": "regression",
            "return_dict": False,
        }
    },
}


def suite_folder() -> Path:
    """Where the tests of the installed transformers are expected."""
    return Path(sys.prefix) / "share" / "transformers-tests" / version("transformers")


def load_suite(name: str) -> Any:
    """Import a module of the suite."""
    if PACKAGE not in sys.modules:
        _add_package(PACKAGE, suite_folder())
        for path, names in STAND_INS.items():
            folder, _, module = path.partition(".")
            stand_in = ModuleType(f"{PACKAGE}.{path}")
            vars(stand_in).update(names)
            sys.modules[stand_in.__name__] = stand_in
            setattr(_add_package(f"{PACKAGE}.{folder}", None), module, stand_in)
    # The suite imports transformers once more from the folder it lies in, which is that of a repository.
    with mock.patch("transformers.utils.direct_transformers_import", return_value=transformers):
        return importlib.import_module(f"{PACKAGE}.{name}")


def _add_package(name: str, folder: Path | None) -> ModuleType:
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [] if folder is None else [str(folder)]
    package = module_from_spec(spec)
    sys.modules[name] = package
    return package
