"""Things that are run on trained models and written down."""
