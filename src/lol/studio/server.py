"""`lol studio`: from flags to a running server and back to the prompt."""

from pathlib import Path

from lol.errors import UserError
from lol.serve.engine import Engine
from lol.serve.guard import Access, is_loopback
from lol.serve.hosting import address_of, listen, read_token, run_server
from lol.studio.app import Shown, make_app
from lol.studio.limits import QUEUE, Studio
from lol.studio.models import Models
from lol.studio.results import Results
from lol.studio.runs import Runs
from lol.studio.saved_paths import SavedPaths


def studio(command: Studio) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Raises:
        UserError: flags that do not fit, a port that is taken, or a folder without a model.
    """
    token = read_token(command.token)
    # First what fails at once, then the model, which takes its time.
    with listen(command.host, command.port, token) as listener:
        runs = Runs(_folder("runs", command.runs))
        models = Models(command.model, runs)
        results = Results(_folder("results", command.results))
        shown = Shown(models, runs, results, SavedPaths(command.paths))
        _load_first(models, named=bool(command.model))
        engine = Engine(QUEUE)
        app = make_app(shown, engine, Access(command.host, token, guarded="/api"))
        private = is_loopback(listener.getsockname()[0])
        page = address_of(command.host, listener) + ("/" if token is None else "/#token=…")
        who = "this machine only" if private else "other machines too, with the token"
        run_server(app, engine, listener, f"lol studio at {page} for {who} (Ctrl-C ends it)")


def _folder(name: str, given: Path | None) -> Path | None:
    """A folder that was named, or the usual one if it is there."""
    if given is not None and not given.is_dir():
        raise UserError(f"--{name} {given}: there is no such folder")
    usual = Path(name)
    return given or (usual if usual.is_dir() else None)


def _load_first(models: Models, named: bool) -> None:
    """Have the model that is shown first in memory, so that the first text is answered at once."""
    listed = models.listed()
    if not listed:
        return
    try:
        models.load(listed[0].id)
    except UserError:
        # One that was named has to work; a run's may be damaged, and there may be others.
        if named:
            raise
