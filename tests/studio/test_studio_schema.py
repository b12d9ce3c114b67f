"""Whatever is asked, no answer is a failure of the server's, and every answer is what the API's own document says."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import CHECKS

from lol.serve.engine import Engine
from lol.serve.guard import Access
from lol.studio.app import make_app
from studio_cases import shown_in

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def api(place: Path, served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    root = tmp_path_factory.mktemp("schema")
    for folder in ("runs", "results"):
        shutil.copytree(place / folder, root / folder, symlinks=True)
    engine = Engine(queue=32)
    # The name under which the in-process client calls.
    app = make_app(shown_in(root, served_folder), engine, Access("testserver", guarded="/api"))
    yield schemathesis.openapi.from_asgi("/api/openapi.json", app)
    engine.close()


NAMES = {"name": ["demo", "toy", "maze"], "file": ["forming.svg"]}
EXAMPLES = 12
# Not those that have to know what is there: that a request fits the schema does not say that its model exists.
CHECKED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)


def aim(case: Any) -> None:
    """Let half of the cases ask for what is there: what is made up hits no model, and would write for a long time."""
    if isinstance(case.body, dict):
        if isinstance(case.body.get("model"), str) and len(case.body["model"]) % 2 == 0:
            case.body["model"] = "model:loud"
            branches = case.body.get("branches")
            for asked in [case.body, *(branches if isinstance(branches, list) else [])]:
                if isinstance(asked, dict) and isinstance(asked.get("path"), list):
                    asked["path"] = [0, 1, 2, 0]
        if "hidden_size" in case.body:
            case.body |= {"hidden_size": 64, "num_attention_heads": 4, "window_size": 16, "window_stride": 8}
        if "branches" in case.body:
            case.body["max_new_tokens"] = 2
    for name, known in NAMES.items():
        given = str(case.path_parameters.get(name, "x"))
        if len(given) % 2 == 0:
            case.path_parameters[name] = known[len(given) // 2 % len(known)]
    if "id" in case.query:
        case.query["id"] = "run:demo"


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def ask(operation: Any, mode: schemathesis.GenerationMode, statuses: list[int], data: st.DataObject) -> None:
    case = data.draw(operation.as_strategy(generation_mode=mode))
    aim(case)
    answer = case.call()
    statuses.append(answer.status_code)
    case.validate_response(answer, checks=CHECKS.get_by_names(list(CHECKED)))


def test_the_api_is_what_it_says(api: Any) -> None:
    operations = [found.ok() for found in api.get_all_operations()]
    assert len(operations) >= 15
    for operation in operations:
        statuses: list[int] = []
        modes = [schemathesis.GenerationMode.POSITIVE]
        # Whatever is in an address is a name.
        if operation.body or operation.query:
            modes.append(schemathesis.GenerationMode.NEGATIVE)
        for mode in modes:
            ask(operation, mode, statuses)
        # Some get through: else nothing was tested.
        assert 200 in statuses, (operation.label, statuses)
