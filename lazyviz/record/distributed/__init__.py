"""One rank of N without the others: process groups that answer shapes, collectives as nodes."""
