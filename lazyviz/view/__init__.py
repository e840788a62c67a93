"""Pictures of a graph and its plan: the scene, its layout, renderers, exports and the widget."""
