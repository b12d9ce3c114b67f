"""`lol paths …`: what a user reads from and forces on a model, with their own documents."""
