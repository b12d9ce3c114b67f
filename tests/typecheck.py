"""What checks the annotations of `lol` while its tests run: beartype, but for functions inside of functions.

Such a function is made anew at each call of the outer one, and beartype would compile its check each time: a
millisecond, more than a small block takes to run.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from beartype import beartype

F = TypeVar("F", bound=Callable[..., Any])


def check(function: F) -> F:
    return function if "<locals>" in function.__qualname__ else beartype(function)
