"""Active sampling with a model, in runs that are kept in a folder and go on."""
