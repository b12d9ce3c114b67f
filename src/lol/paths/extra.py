"""The extra `experiments`: scikit-learn and scipy, imported where a probe or a matching first needs them."""

from importlib import import_module
from typing import Any

from lol.errors import UserError


def need(module: str) -> Any:
    """Import a module of scikit-learn or scipy.

    Raises:
        UserError: it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        if (error.name or "").split(".")[0] != package:
            raise
        raise UserError(
            f"this needs {package}, which is not installed: pip install library-of-layers[experiments]"
        ) from None
