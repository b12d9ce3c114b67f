"""The one exception for mistakes a user can make."""


class UserError(ValueError):
    """A mistake in the input; the message names the fix. The CLI prints it and exits with 2."""
