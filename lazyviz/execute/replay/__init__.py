"""Program cache: subgraphs that have run before run again as generated code."""
