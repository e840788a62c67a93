"""The ``lazyviz`` command line: plan, view, and run unmodified scripts."""
