"""Renderers: SVG, PDF, PNG, Graphviz, and terminal text."""
