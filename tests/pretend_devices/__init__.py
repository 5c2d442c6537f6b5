"""Pretended GPUs: tensors of the CPU that say they are on `cuda:N`, and a search for races."""
