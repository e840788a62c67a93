"""Recording one rank of N: process groups that return shapes, and collectives as nodes."""
