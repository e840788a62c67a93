"""The ``%%lazy`` and ``%lazy`` magics: the life of a notebook cell."""
