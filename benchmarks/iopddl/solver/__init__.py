"""Choose one option for each node: least pairwise costs within a memory limit."""
