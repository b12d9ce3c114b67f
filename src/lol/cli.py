"""`lol …`."""


def main() -> None:
    """Entry point of the command line."""
