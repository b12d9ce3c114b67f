"""The annotations of `lol` are checked while its tests run."""

import pytest
import torch
from jaxtyping import TypeCheckError

from lol.model.windows import line_up
from typecheck import check


def test_a_wrong_shape_is_refused():
    line_up(torch.tensor([3, 2]))
    with pytest.raises(TypeCheckError):
        line_up(torch.tensor([[3, 2]]))


def test_functions_inside_of_functions_are_left_alone():
    def inner(x: int) -> int:
        return x

    assert check(inner) is inner
