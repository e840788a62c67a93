"""Scene: the boxes, edges, texts, and memory chart of a picture, without coordinates."""
