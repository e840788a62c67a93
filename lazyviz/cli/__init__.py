"""The command ``lazyviz``: scripts planned, shown and run as they are."""
