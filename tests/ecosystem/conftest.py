"""Marks that transformers' own tests carry."""

import pytest

TRANSFORMERS_MARKS = (
    "accelerate_tests",
    "flash_attn_test",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "is_training_test",
    "torch_compile_test",
)


def pytest_configure(config: pytest.Config) -> None:
    for mark in TRANSFORMERS_MARKS:
        config.addinivalue_line("markers", f"{mark}: a mark of transformers' own tests")
