"""Scene: the boxes, edges, texts and memory chart of a picture, before they have coordinates."""
