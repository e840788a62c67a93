"""What a picture is made of: boxes, edges, texts and the memory chart, before anything has a place."""
