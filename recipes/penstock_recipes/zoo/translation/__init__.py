"""Translation: the model, its loss, and the search for the best sentence."""
