"""Program cache: nodes that were run before run again as generated code, without a look at each."""
