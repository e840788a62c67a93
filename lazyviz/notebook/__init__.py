"""The ``%%lazy`` and ``%lazy`` magics: the life cycle of a notebook cell."""
