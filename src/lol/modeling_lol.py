"""Opens this checkpoint, a Library-of-Layers model, with `trust_remote_code=True`.

Nothing is computed here: the classes are those of the installed package library-of-layers.
"""

# In a `try`, or transformers would look for a package "lol" by itself and advise to install it under that name.
try:
    from lol import LoLConfig, LoLForCausalLM, LoLModel
except ImportError as error:
    raise ImportError(
        f"this is a Library-of-Layers model and needs the Python package library-of-layers ({error}): install that "
        "package into this environment (pip install, with its name or the path of its source), then load again"
    ) from error

__all__ = ["LoLConfig", "LoLForCausalLM", "LoLModel"]
