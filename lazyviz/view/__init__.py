"""Pictures of a graph and its plan: scene, layout, renderers, exports, and the widget."""
