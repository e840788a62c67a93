"""Program cache: subgraphs that were run before run again as generated code."""
