"""`lol serve`: from flags to a running server and back to the prompt."""

from lol.errors import UserError
from lol.serve.app import make_app
from lol.serve.completions import Served
from lol.serve.engine import Engine
from lol.serve.guard import Access
from lol.serve.hosting import address_of, listen, read_token, run_server
from lol.serve.limits import Limits, Serve
from lol.train.loading import load_model


def serve(command: Serve) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Raises:
        UserError: flags that do not fit, a port that is taken, or a folder without a model.
    """
    check_limits(command.limits)
    token = read_token(command.token)
    # First what fails at once, then the model, which takes its time.
    with listen(command.host, command.port, token) as listener:
        model, tokenizer = load_model(command.model)
        served = Served(command.model.resolve().name, model, tokenizer, command.limits)
        engine = Engine(command.limits.queue)
        app = make_app(served, engine, Access(command.host, token))
        line = f"serving {served.name} at {address_of(command.host, listener)}/v1 (Ctrl-C ends it)"
        run_server(app, engine, listener, line)


def check_limits(limits: Limits) -> None:
    """Raise `UserError` for bounds that let nothing through."""
    for name, least in {"max_prompt_tokens": 1, "max_new_tokens": 1, "max_choices": 1, "queue": 0}.items():
        if getattr(limits, name) < least:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is {getattr(limits, name)}: give at least {least}")
