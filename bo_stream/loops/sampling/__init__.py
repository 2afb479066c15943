"""Active sampling with a model, in runs that can be stopped and resumed."""
