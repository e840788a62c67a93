"""Pictures and text: SVG, PDF, PNG, Graphviz, the terminal."""
