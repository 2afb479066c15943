"""Executors: any ``concurrent.futures.Executor`` by name, and what its workers must share."""
