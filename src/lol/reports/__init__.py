"""What can be said of a model, a recipe or a run without training one: tables, the report of a run, its screen."""
