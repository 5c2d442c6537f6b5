"""Translation: the model, its loss and beam search."""
