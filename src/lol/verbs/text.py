"""Verbs that run a model on text: generate, serve, studio, and what paths tell."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lol import flags
from lol.errors import UserError
from lol.verbs.shared import needs_extra


@dataclass(frozen=True)
class Generate:
    """Continue a prompt, which counts as the beginning of a document.

    Without --prompt it reads standard input: a pipe is one prompt; at a terminal every line you type is added to the
    text, and the model goes on from there (/help there says more).

    Example: lol generate --model runs/demo --prompt "import os" --path 0 1 2 3 0 1 --show-path
    """

    model: Path
    """A run folder (its newest checkpoint), a checkpoint, or a folder written by transformers."""
    prompt: str | None = None
    """The text to continue. Default: standard input."""
    max_new_tokens: int = 100
    """Stop after so many tokens, if the document does not end before."""
    temperature: float = 0.8
    """0 takes the most probable token every time."""
    top_k: int = 50
    """Sample among so many most probable tokens."""
    top_p: float = 1.0
    """Sample among the most probable tokens that have so much probability together."""
    seed: int = 0
    """Decides the sample."""
    path: list[int] | None = None
    """One block per depth that every window is to run; -1 leaves a depth to the router."""
    path_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Instead of --path: a path that lol studio has saved, with its weight."""
    show_path: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print to standard error, where windows begin, the block and weight of each depth."""


def generate(args: list[str]) -> int:
    from lol import terminal
    from lol.decoding import lay_path
    from lol.generate import Sampling
    from lol.paths.saved import SavedPath, read_saved_path
    from lol.train.loading import load_model

    command = flags.parse(Generate, "generate", args)
    sampling = Sampling(command.max_new_tokens, command.temperature, command.top_k, command.top_p)
    saved: SavedPath | None = None
    if command.path_file is not None:
        if command.path is not None:
            raise UserError("--path and --path-file both force blocks: give one of them")
        saved = read_saved_path(command.path_file)
    model, tokenizer = load_model(command.model)
    if saved is not None:
        try:
            lay_path(saved.path, model.config)
        except UserError as error:
            raise UserError(f"{command.path_file} is no path of {command.model}: {error}") from None
    return terminal.generate(
        model,
        tokenizer,
        command.prompt,
        sampling=sampling,
        seed=command.seed,
        path=command.path if saved is None else saved.path,
        path_weight=None if saved is None else saved.path_weight,
        show_path=command.show_path,
    )


def serve(args: list[str]) -> int:
    from lol.serve.limits import Serve

    command = flags.parse(Serve, "serve", args)
    with needs_extra("serve"):
        from lol.serve.server import serve as run_server
    run_server(command)
    return 0


def studio(args: list[str]) -> int:
    from lol.studio.limits import Studio

    command = flags.parse(Studio, "studio", args)
    with needs_extra("studio"):
        from lol.studio.server import studio as run_studio
    run_studio(command)
    return 0


@dataclass(frozen=True)
class PathsShow:
    """Print the block of every window and depth of a text, with the weight of its update.

    Example: lol paths show --model runs/demo --text "def f(x): return x"
    """

    model: Path
    """A run folder (its newest checkpoint), a checkpoint, or a folder written by transformers."""
    text: str
    """The text, read as the beginning of a document."""


def paths_show(args: list[str]) -> int:
    from lol.reports.run import show_paths
    from lol.train.loading import load_model

    command = flags.parse(PathsShow, "paths show", args)
    show_paths(*load_model(command.model), command.text)
    return 0


@dataclass(frozen=True)
class PathsReport:
    """Write a run's report: loss, use of the blocks, a sample, and held-out text coloured by path, in one HTML file.

    Example: lol paths report --run runs/demo
    """

    run: Path
    """The run folder."""
    out: Path | None = None
    """The file to write; without it, report.html in the run folder."""
    documents: int = 6
    """Held-out rows to show."""


def paths_report(args: list[str]) -> int:
    from lol.reports.run import report_run

    command = flags.parse(PathsReport, "paths report", args)
    print(f"written: {report_run(command.run, out=command.out, num_rows=command.documents)}")
    return 0


def paths_tool(name: str, args: list[str]) -> int:
    from lol.paths.tools.read import TOOLS

    command, run = TOOLS[name]
    run(flags.parse(command, f"paths {name}", args))
    return 0
